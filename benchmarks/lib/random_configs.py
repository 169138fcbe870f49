"""Random configs of every kind of model that tests have, against Transformers, token for token.

    python benchmarks/configs.py random --configs 30 qwen3_next gemma4

Each config is one of tests/runtime/conftest.py with sizes, flags, kinds of layers, windows and
experts drawn anew; weights are random, in float32. Each is run three times, over one, two and three
stages, every time with other steps, pools, preemptions and drafts (lib/drawn_runs.py). A config
that Transformers or llmpq refuses is counted, and says why with `--refusals`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from importlib import util
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.drawn_runs import DrawnPrompts, DrawnRun, Oracle

from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from reference.mtp_models import make_mtp_model

STAGES = (1, 2, 3)
LONG = 512
"""Positions of models that state no other number: prompts are longer than a block."""
TESTS = Path(__file__).parents[2] / "tests"
SIZES: dict[str, tuple[int, ...]] = {
    "hidden_size": (32, 48, 64, 96),
    "intermediate_size": (40, 64, 96),
    "head_dim": (16, 24, 32),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "sliding_window": (3, 5, 8, 13),
    "moe_intermediate_size": (24, 40),
    "num_experts_per_tok": (1, 2, 3),
    "shared_expert_intermediate_size": (24, 48),
    "shared_intermediate_size": (24, 48),
    "linear_conv_kernel_dim": (2, 3, 4),
    "linear_key_head_dim": (8, 12, 16),
    "linear_value_head_dim": (8, 16, 24),
    "linear_head_dim": (8, 16),
    "linear_num_heads": (1, 2, 3),
    "conv_L_cache": (2, 3, 4),
    "mamba_d_state": (8, 12, 16),
    "mamba_d_conv": (2, 4),
    "ssm_state_size": (8, 10, 16),
    "kv_lora_rank": (16, 24),
    "qk_nope_head_dim": (8, 16),
    "v_head_dim": (8, 12, 20),
    "n_shared_experts": (1, 2),
    "index_topk": (2, 5, 9),
    "attention_chunk_size": (5, 7, 11),
    "first_k_dense_replace": (0, 1, 2),
    "num_kv_shared_layers": (0, 1, 2),
}
FACTORS = ("multiplier", "factor", "softcapping", "logit_scale", "_scale")
"""Ends of keys whose numbers are drawn anew within a half of what they are."""
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "conv_bias")
"""Flags that are drawn where a class of Transformers has them."""
KEPT = ("rope_parameters", "vision_config", "audio_config", "query_pre_attn_scalar")


def kinds() -> Any:
    """Return the tests' module of models."""
    spec = util.spec_from_file_location("kinds_of_tests", TESTS / "runtime" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drawn(options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a config's options with others in their places."""
    found = {key: _other(key, value, rng) for key, value in options.items()}
    if "short_factor" in (options.get("rope_parameters") or {}):  # one for each pair of channels
        found["hidden_size"], found["num_attention_heads"] = 64, 4
    if "mamba_d_head" in found:  # twice the hidden size is that of all heads
        found["hidden_size"] = 64
    if "kv_lora_rank" in found:  # latents are of all heads
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def with_flags(name: str, options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return options with some flags that they do not name."""
    known = vars(getattr(transformers, f"{name}Config"))
    own = {key: rng.random() < 0.5 for key in FLAGS if key in known and rng.random() < 0.3}
    return {**own, **options}


def _other(key: str, value: Any, rng: random.Random) -> Any:
    if key == "text_config" and isinstance(value, dict):
        return drawn(value, rng)
    if key in KEPT or rng.random() < 0.3:
        return value
    if isinstance(value, bool):
        return rng.random() < 0.5
    if key in SIZES and isinstance(value, int):
        return rng.choice(SIZES[key])
    if isinstance(value, float) and key.endswith(FACTORS):
        return round(value * rng.uniform(0.5, 1.5), 3)
    if key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
        found = [*value]
        rng.shuffle(found)
        return found
    return value


def oracle_of(
    module: Any, made: Any, kind: str, options: dict[str, Any], folder: Path
) -> tuple[Path, Oracle, bool]:
    """Return a model's directory, what Transformers gives, and whether it has an MTP head."""
    directory = made.directory(kind)
    name, family = module.KINDS[kind][0], ModelSpec.from_directory(directory).family
    dense = (
        options.get("decoder_sparse_step", 1) > 1
    )  # the layer behind the last one, by its number
    if FAMILIES[family].names.mtp is None or "text_config" in options or dense:
        plain = Oracle(
            greedy=lambda prompt: made.greedy(kind, [prompt])[0],
            logits=lambda tokens: made.reference(kind)(torch.tensor([tokens])).logits[0],
        )
        return directory, plain, False
    model = make_mtp_model(folder / "mtp", family, name, options)
    with_head = Oracle(
        greedy=lambda prompt: model.greedy(prompt, module.NEW),
        logits=lambda tokens: model.hidden(tokens) @ model.output.t(),
    )
    return model.directory, with_head, True


def outcome(
    module: Any, kind: str, options: dict[str, Any], folder: Path, happened: Counter[str]
) -> tuple[str, str]:
    """Return what came of a config, `equal`, `differs`, `not made` or `refused`, and why."""
    module.KINDS[kind] = (module.KINDS[kind][0], options)
    made = module.Models(folder)
    try:
        directory = made.directory(kind)
    except Exception as error:  # whatever a class of Transformers trips over
        return "not made", f"{type(error).__name__}: {error}"
    try:
        spec = ModelSpec.from_directory(directory)
    except ValueError as error:
        return "refused", str(error)
    if spec.num_params != made.num_params(kind):
        return "differs", f"{spec.num_params} parameters, Transformers has {made.num_params(kind)}"
    rng = random.Random(json.dumps(options, default=str))
    try:  # a cache of Transformers may not know such layers
        directory, oracle, has_head = oracle_of(module, made, kind, options, folder)
        prompts = DrawnPrompts(directory, oracle, rng)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    for stages in STAGES:
        places = rng.sample(range(1, spec.num_layers), min(stages, spec.num_layers) - 1)
        splits = made.cuts(kind, tuple(places))
        why = prompts.difference(DrawnRun.draw(rng, prompts, splits=splits, has_head=has_head))
        if why:
            return "differs", why
    happened.update(prompts.happened)
    return "equal", ""


def counted(found: Counter[str]) -> str:
    """Return counts in words, the most frequent first."""
    return ", ".join(f"{n} {what}" for what, n in found.most_common())


def main(words: list[str], program: str) -> None:
    """Print a line for each kind, and every config that differs."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="names of kinds, or parts of them; all by default")
    parser.add_argument("--configs", type=int, default=30, help="configs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refusals", action="store_true", help="say what was refused, and why")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    module = kinds()
    originals = dict(module.KINDS)
    chosen = [k for k in originals if not args.kinds or any(part in k for part in args.kinds)]
    failed = False
    configs: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for kind in chosen:
        found: Counter[str] = Counter()
        happened: Counter[str] = Counter()
        for number in range(args.configs):
            rng = random.Random(f"{kind} {args.seed} {number}")
            name, original = originals[kind]
            base = {**module.BASE, "max_position_embeddings": LONG}
            options = drawn(with_flags(name, {**base, **original}, rng), rng)
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                came, why = outcome(module, kind, options, Path(folder), happened)
            found[came] += 1
            if came == "differs" or (args.refusals and came != "equal"):
                print(f"{kind} {number}: {came}: {why[:900]}\n  {json.dumps(options)}", flush=True)
            failed = failed or came == "differs"
        total.update(happened)
        configs.update(found)
        print(f"{kind}: {counted(found)} ({counted(happened)})", flush=True)
    print(f"all: {counted(configs)} ({counted(total)})")
    raise SystemExit(failed)
