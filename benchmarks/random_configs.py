"""Random configs of every kind of model that tests have, against Transformers, token for token.

    python benchmarks/random_configs.py --configs 30 qwen3_next gemma4

Each config is one of tests/runtime/conftest.py with sizes, flags, kinds of layers, windows and
experts drawn anew; weights are random, in float32. Prompts of one token, of a few, and beyond
windows run on one stage and on three. A config that Transformers or llmpq refuses is counted, and
says why with `--refusals`.
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

from llmpq.model_spec import ModelSpec
from reference.pipeline import ReferencePipeline

TESTS = Path(__file__).parents[1] / "tests"
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


def outcome(module: Any, kind: str, options: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return what came of a config, `equal`, `differs`, `not made` or `refused`, and why."""
    module.KINDS[kind] = (module.KINDS[kind][0], options)
    made = module.Models(folder)
    try:
        directory = made.directory(kind)
    except Exception as error:  # whatever a class of Transformers trips over
        return "not made", f"{type(error).__name__}: {error}"
    rng = random.Random(len(json.dumps(options, default=str)))
    prompts = [[rng.randrange(1, module.VOCAB) for _ in range(n)] for n in (1, 7, 24)]
    try:
        want = made.greedy(kind, prompts)
    except Exception as error:  # a cache of Transformers that does not know such layers
        return "not made", f"{type(error).__name__}: {error}"
    try:
        spec = ModelSpec.from_directory(directory)
    except ValueError as error:
        return "refused", str(error)
    if spec.num_params != made.num_params(kind):
        return "differs", f"{spec.num_params} parameters, Transformers has {made.num_params(kind)}"
    for splits in ((), (1, 3)):
        pipeline = ReferencePipeline.from_directory(directory, splits=made.cuts(kind, splits))
        try:
            got = pipeline.generate(prompts, max_new=module.NEW)
        except ValueError as error:  # rope that changes while a request grows
            return "refused", str(error)
        if got != want:
            return "differs", f"stages {splits}: {got} for {want}"
    return "equal", ""


def main() -> None:
    """Print a line for each kind, and every config that differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="names of kinds, or parts of them; all by default")
    parser.add_argument("--configs", type=int, default=30, help="configs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refusals", action="store_true", help="say what was refused, and why")
    args = parser.parse_args()
    torch.set_num_threads(1)
    module = kinds()
    originals = dict(module.KINDS)
    chosen = [k for k in originals if not args.kinds or any(part in k for part in args.kinds)]
    failed = False
    for kind in chosen:
        found: Counter[str] = Counter()
        for number in range(args.configs):
            rng = random.Random(f"{kind} {args.seed} {number}")
            name, original = originals[kind]
            options = drawn(with_flags(name, {**module.BASE, **original}, rng), rng)
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                came, why = outcome(module, kind, options, Path(folder))
            found[came] += 1
            if came == "differs" or (args.refusals and came != "equal"):
                print(f"{kind} {number}: {came}: {why[:300]}\n  {json.dumps(options)}", flush=True)
            failed = failed or came == "differs"
        print(f"{kind}: {', '.join(f'{n} {came}' for came, n in found.most_common())}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
