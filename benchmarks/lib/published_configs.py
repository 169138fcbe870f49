"""Published config.json files: read, planned, and run equal to Transformers, or refused.

    python benchmarks/configs.py published

Each line of data/published_configs.jsonl is an object: `origin` (repository and path where the file
was published) and `config` (what it says, without quantisation). A config is read and planned as it
is; then it is shrunk (few layers, narrow, a small vocabulary; every option stays), given random
weights by Transformers, and both generate. One row of all goes to results/configs.jsonl: what came
of each family, and every refusal by its words.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.rows import write_row
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmpq.families import WRAPPERS
from llmpq.families.common.class_defaults import SAME_CLASS, config_class
from llmpq.planner.make import make_plan
from reference.pipeline import ReferencePipeline

CONFIGS = Path(__file__).parents[1] / "data" / "published_configs.jsonl"
VOCAB, LAYERS, HIDDEN, HEADS, HEAD = 199, 6, 64, 4, 16
SHORT, NEW = 40, 6
"""Positions of a scaled model's training, and tokens to generate."""
JOB = {"batch": 1, "prompt_len": 64, "gen_len": 8, "method": "uniform"}
PROMPTS = ([5, 17, 120, 3], [(7 * i) % 190 + 2 for i in range(SHORT + 12)])
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "n_embed": HIDDEN,
    "n_embd": HIDDEN,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "rotary_dim": 8,
    "word_embed_proj_dim": HIDDEN,
    "intermediate_size": 96,
    "shared_intermediate_size": 80,
    "ffn_dim": 96,
    "moe_intermediate_size": 40,
    "moe_latent_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "sliding_window": 12,
    **LATENT,
}
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
}
FLOAT32 = {"dtype": "float32", "torch_dtype": "float32"}
SCALED = ("yarn", "dynamic", "longrope", "su", "llama3")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a config."""

    origin: str
    model_type: str
    planned: bool = False
    equal: bool = False
    refused: str = ""
    fails: str = ""
    """What went wrong between plan and tokens."""


def published() -> list[dict[str, Any]]:
    """Return every config and where it was published."""
    return [json.loads(line) for line in CONFIGS.read_text().splitlines()]


def refusal(config: dict[str, Any]) -> str:
    """Return why a config is not planned, nothing where it is."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(unquantised(config)))
            make_plan(model=folder, devices="H200:16", **JOB)
    except ValueError as error:
        return text_of(error)
    return ""


def tried(origin: str, config: dict[str, Any]) -> Outcome:
    """Return what comes of a config."""
    kind = str(config.get("model_type"))
    refused = refusal(config)
    if refused:
        return Outcome(origin=origin, model_type=kind, refused=refused)
    try:
        equal = runs_equal(shrunk(config))
    except Exception as error:  # of either side: the others are tried all the same
        return Outcome(origin=origin, model_type=kind, planned=True, fails=text_of(error))
    return Outcome(origin=origin, model_type=kind, planned=True, equal=equal)


def text_of(error: Exception) -> str:
    """Return what an error says without folders of this run, and without what llmpq runs."""
    return re.sub(r"'/tmp/[^']*': ", "", f"{error}").partition("; it runs ")[0][:300]


def unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without its quantisation, which is no matter here."""
    without = ("quantization_config", "quantization", "compression_config")
    kept = {key: value for key, value in config.items() if key not in without}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = unquantised(kept["text_config"])
    return kept


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny model's config that says whatever else this one says."""
    config = unquantised(config)
    kind = str(config["model_type"])
    if kind in INSIDE:
        config, kind = {"model_type": INSIDE[kind], "text_config": config}, INSIDE[kind]
    if kind not in WRAPPERS:
        return _shrunk_text(config, kind)
    text = config.get("text_config") or config
    own = str(text.get("model_type", kind))
    own = str(config_class(kind).text if own == kind else own)
    tiny = {**_shrunk_text(text, own), "model_type": own}
    tiny = {k: v for k, v in tiny.items() if k not in ("vision_config", "text_config")}
    found = {"model_type": kind, "text_config": tiny, "vision_config": VISION}
    if config.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    return found


def _shrunk_text(config: dict[str, Any], kind: str) -> dict[str, Any]:
    known = config_class(kind).defaults
    said = {**{k: v for k, v in known.items() if v is not None}, **config}
    found = dict(config)
    for key, value in PLAIN.items():
        unused = key.startswith("moe_") and "E" not in said.get("hybrid_override_pattern", "E")
        if said.get(key) and (key in config or key in known) and not unused:
            found[key] = value
    layers = min(LAYERS, said.get("num_hidden_layers") or said.get("n_layer") or LAYERS)
    heads_keys = [k for k in ("num_attention_heads", "n_head") if k in said] or ["n_head"]
    heads, kv = said[heads_keys[0]], said.get("num_key_value_heads")
    latent = "kv_lora_rank" in said
    found |= dict.fromkeys(heads_keys, HEADS)
    for key, count in (("num_key_value_heads", kv), ("num_kv_heads", said.get("num_kv_heads"))):
        if count is not None:
            found[key] = HEADS if count == heads or latent else 1 if count == 1 else 2
    if said.get("head_dim") is not None and not latent:
        found["head_dim"] = 2 * HEAD
    for key in ("num_hidden_layers", "n_layer"):
        if key in said:
            found[key] = layers
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if isinstance(config.get(key), list | str):
            found[key] = _varied(config[key], layers)
    for key in EXPERTS:
        if said.get(key):
            found[key] = 8
    for key in PER_TOKEN:
        taken = said.get(key)
        if taken:
            found[key] = min(3, taken[0] if isinstance(taken, list) else taken)
    if said.get("n_group"):
        found |= {"n_group": 1, "topk_group": 1} if said["n_group"] == 1 else GROUPED
    if said.get("first_k_dense_replace"):
        found["first_k_dense_replace"] = 1
    found |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    if said.get("head_dim") and said["head_dim"] == said.get("qk_head_dim"):
        both = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
        found |= {"head_dim": both, "qk_head_dim": both}
    _shrink_rope(found, said)
    return found


INSIDE = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
}
"""Language models that Transformers runs in their whole model only."""
GROUPED = {"n_group": 4, "topk_group": 2}


def _varied(kinds: Any, count: int) -> Any:
    """Return so many layers in a row, the first of those with the most kinds."""
    starts = range(max(1, len(kinds) - count + 1))
    first = max(starts, key=lambda start: (len({*kinds[start : start + count]}), -start))
    return kinds[first : first + count]


def _shrink_rope(found: dict[str, Any], said: dict[str, Any]) -> None:
    """Shorten what a scaled model was trained on, so that a prompt goes beyond it."""
    longest = said.get("max_position_embeddings", 2048)
    beside = said.get("original_max_position_embeddings")
    share = said.get("partial_rotary_factor") or 1.0
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(found.get(name), dict):
            continue
        rope = found[name] = dict(found[name])
        share = rope.get("partial_rotary_factor", share)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in SCALED:
            original = beside or rope.get("original_max_position_embeddings", longest)
            found["max_position_embeddings"] = max(SHORT, round(SHORT * longest / original))
            if "original_max_position_embeddings" in rope:
                rope["original_max_position_embeddings"] = SHORT
        for key in ("short_factor", "long_factor"):
            if isinstance(rope.get(key), list):
                head = found.get("head_dim", HEAD)
                rope[key] = rope[key][: int(head * share) // 2]
        if "mrope_section" in rope:
            half = found.get("head_dim", HEAD) // 2
            rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
        if kind in ("su", "longrope"):
            found["max_position_embeddings"] = 4 * SHORT
    if beside is not None and "original_max_position_embeddings" in said:
        found["original_max_position_embeddings"] = SHORT


def runs_equal(config: dict[str, Any]) -> bool:
    """Whether both generate the same tokens from a tiny config."""
    torch.manual_seed(3)
    model = random_model(config)
    with torch.no_grad():
        stored = [(name, b) for name, b in model.named_buffers() if "correction" in name]
        for name, tensor in [*model.named_parameters(), *stored]:
            noise = torch.randn_like(tensor)
            spread = tensor.ndim > 1 or any(k in name for k in ("sinks", "bias", "correction"))
            tensor.copy_(noise * 0.1 if spread else tensor + noise * 0.1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # What llmpq reads is the published config, not what Transformers made of it.
        said = {**config, **FLOAT32}
        if "text_config" in said:
            said["text_config"] = {**said["text_config"], **FLOAT32}
        (Path(folder) / "config.json").write_text(json.dumps(said))
        pipeline = ReferencePipeline.from_directory(folder, max_len=len(PROMPTS[1]) + NEW)
        for prompt in PROMPTS:
            theirs = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                use_mtp=False,  # published configs may say so of generation, too
            )[0, len(prompt) :].tolist()
            if pipeline.generate([prompt], max_new=NEW) != [theirs]:
                return False
    return True


def random_model(config: dict[str, Any]) -> Any:
    """Return Transformers' model of a config, in float32."""
    kind = str(config["model_type"])
    known = SAME_CLASS.get(kind, kind)
    own = CONFIG_MAPPING[known].from_dict({**config, "model_type": known})
    own.dtype = torch.float32
    auto = transformers.AutoModelForCausalLM
    if kind in WRAPPERS:
        auto = transformers.AutoModelForImageTextToText
    return auto.from_config(own, attn_implementation="eager").float().eval()


def main(words: list[str], program: str) -> None:
    """Try every config, write the row and print what was refused or differs."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the origins to try")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = []
    for entry in published():
        if args.only in entry["origin"]:
            outcome = tried(entry["origin"], entry["config"])
            found.append(outcome)
            ends = outcome.refused or outcome.fails or "differs"
            ends = "equal" if outcome.equal else ends
            print(f"{outcome.model_type} {outcome.origin}: {ends}", flush=True)
    families: dict[str, Counter[str]] = {}
    refused: dict[str, Counter[str]] = {}
    for outcome in found:
        counts = families.setdefault(outcome.model_type, Counter())
        counts["configs"] += 1
        counts["planned"] += outcome.planned
        counts["equal"] += outcome.equal
        if outcome.refused:
            refused.setdefault(outcome.model_type, Counter())[outcome.refused] += 1
    print(json.dumps(families, indent=1))
    if not args.only:
        write_row(
            "configs.jsonl",
            bench="published_configs",
            case={"families": families, "refused": refused},
            samples=[float(outcome.equal) for outcome in found],
            unit="equal to Transformers",
        )
