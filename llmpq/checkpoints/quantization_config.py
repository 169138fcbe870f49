"""Reads config.json's `quantization_config`: which forms are supported, and which are refused.

The names of tensors tell a layer's form; these words tell what the names do not, and would change
what the model computes if they were ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.model_config import inside, read_config
from llmpq.families.common.config_values import is_given, section
from llmpq.file_form import read_json

METHODS = (
    "compressed-tensors",
    "gptq",
    "awq",
    "llmpq",
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "bitsandbytes",
    "modelopt",
)
"""Values of `quant_method` that are read; AutoRound's becomes GPTQ's or AWQ's."""
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""Method -> the layouts of codes that are read."""
LAYOUT_KEYS = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "format")}
"""Method -> the keys that name a layout, an older and a newer one."""
AUTO_ROUND = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
    "auto_round:awq": {"quant_method": "awq", "version": "gemm"},
}
"""AutoRound's `packing_format` -> the form that it is: zero points less one, or as they are."""
NVFP4 = ("NVFP4", "W4A16_NVFP4")
"""ModelOpt's `quant_algo` of the same codes, for inputs of 4 and of 16 bits."""
MODELOPT = {
    **dict.fromkeys(NVFP4, 4),
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), 8),
}
"""ModelOpt's `quant_algo` of a linear that are read -> bits."""
MODELOPT_BLOCK = [128, 128]
"""Rows and columns that share a scale of ModelOpt's FP8_PB_WO."""
MIXED = "MIXED_PRECISION"
"""ModelOpt's `quant_algo` of a model whose linears have algorithms of their own."""
KEYS = ("quantization_config", "compression_config")
"""What config.json calls how a model is quantised."""
OWN_FORM = "llmpq"
"""`format` of a model with Atom's layers, which has no `quant_method`."""
BESIDE = "hf_quant_config.json"
"""Where ModelOpt says how a model is quantised, if config.json does not."""
OLDER = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Where GPTQ's, AWQ's and AutoRound's tools do; the first two without a `quant_method`."""
OTHER_NAMES = {
    "awq": ("awq-marlin", "cpu-awq", "moe-wna16"),
    "gptq": ("gptq-marlin", "gptq-bitblas", "moe-wna16"),
    "auto-round": ("inc", "intel/auto-round"),
    "bitsandbytes": ("bnb",),
    "mxfp4": ("gpt-oss-mxfp4",),
}
"""Method -> what vLLM calls it, too: by its kernels, or by its tool."""
CHANGES = {
    "transform_config": "rotations of activations while it runs",
    "rotation": "rotations of activations while it runs",
    "is_marlin_format": "codes in Marlin's order",
    "use_exllama_v2_order": "codes in ExLlama's order",
}
"""Keys that are off where nothing is missed -> what they stand for."""


QUANTIZATION = "config.json, quantization_config"
"""Where a checkpoint says how it is quantised, in error messages."""
SCHEMES = "llmpq_schemes"
"""Metadata key of an Atom file: linear -> fields of its scheme, as JSON."""
FP8_COLUMNS = 64
"""What the columns of a block of FP8 weights are a multiple of, where codes are kept."""

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
"""Where a tensor's name says which layer it is of."""


def quantization_of(model: str | Path | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a model says of how it is quantised, in the words of a form that is read.

    `model`: its directory, or its config. None for a model that is not quantised; `ValueError` for
    other forms of AutoRound and ModelOpt.
    """
    if isinstance(model, Mapping):
        config, folder, directory = model, None, "config.json"
    else:
        config, folder, directory = read_config(model), Path(model), str(model)
    described = _stated(config)
    if described is None and folder is not None:
        described = _beside(folder)
    if described is None:
        return None
    method = described.get("quant_method")
    if method is None and described.get("format") == OWN_FORM:
        return {**described, "quant_method": OWN_FORM}
    if method in ("auto-round", "intel/auto-round"):
        return _of_auto_round(described, directory)
    if str(method).startswith("modelopt") or (method is None and "quant_algo" in described):
        if described.get("quant_algo") is None:  # of a KV cache alone
            return None
        return _of_modelopt(described, directory)
    return dict(described)


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a config says of quantisation: of the whole, or of the language model inside.

    Kimi K2.5 says it there; compressed-tensors' first models called it `compression_config`.
    """
    inner = inside(config) or {}
    stated = (section(c, key) for c in (config, inner) for key in KEYS)
    return next((found for found in stated if found), None)


def _beside(folder: Path) -> Mapping[str, Any] | None:
    """Return what a file beside config.json says of quantisation."""
    own = folder / BESIDE
    if own.is_file():
        stated = read_json(own)
        inner = stated.get("quantization") if isinstance(stated, dict) else None
        if not isinstance(inner, dict):
            raise ValueError(f"'{own}' has no 'quantization'; download it again")
        return {"quant_method": "modelopt", **inner}
    path = next((folder / name for name in OLDER if (folder / name).is_file()), None)
    if path is None:
        return None
    stated = read_json(path)
    if not isinstance(stated, dict):
        raise ValueError(f"'{path}' is no object; download it again")
    if "w_bit" in stated:
        words = {"bits": stated["w_bit"], "group_size": stated.get("q_group_size")}
        return {"quant_method": "awq", **words, **stated}
    return {"quant_method": "gptq", **stated} if "bits" in stated else stated


def _of_auto_round(described: Mapping[str, Any], directory: object) -> dict[str, Any]:
    """Return AutoRound's words as those of GPTQ or AWQ."""
    packing, kind = described.get("packing_format"), described.get("data_type", "int")
    inputs = described.get("act_bits")
    if packing not in AUTO_ROUND or kind != "int" or (inputs or 16) < 16:
        raise ValueError(
            f"'{directory}': config.json, quantization_config: AutoRound with packing_format="
            f"{packing!r}, data_type={kind!r} and act_bits={inputs!r} is not supported; expected "
            f"integers in one of {', '.join(AUTO_ROUND)}, inputs of 16 bits. Export the model in "
            "the form auto_gptq, auto_awq or llm_compressor"
        )
    bits, others = described.get("bits"), described.get("extra_config") or {}
    for name, own in others.items():
        if (own or {}).get("bits", bits) not in (bits, 16, 32):
            raise ValueError(
                f"'{directory}': config.json, quantization_config: AutoRound gives '{name}' "
                f"{own['bits']} bits, others {bits}; llmpq reads one number of bits. Quantise the "
                "model with one"
            )
    return {**described, **AUTO_ROUND[packing], "zero_point": described.get("sym") is not True}


def _of_modelopt(described: Mapping[str, Any], directory: object) -> dict[str, Any]:
    """Return ModelOpt's words with all of its algorithms, and the block of FP8_PB_WO."""
    algorithm = described.get("quant_algo")
    found = {"": algorithm}
    if str(algorithm).upper() == MIXED:
        layers = described.get("quantized_layers")
        if not isinstance(layers, dict) or not layers:
            raise ValueError(
                f"'{directory}': ModelOpt's quant_algo={algorithm!r} has no 'quantized_layers', "
                "which say the algorithm of each; download hf_quant_config.json again"
            )
        found = {name: (one or {}).get("quant_algo") for name, one in layers.items()}
    for name, own in found.items():
        if str(own).upper() not in MODELOPT:
            of = f" of '{name}'" if name else ""
            raise ValueError(
                f"'{directory}': ModelOpt's quant_algo={own!r}{of} is not supported; expected "
                f"{', '.join(MODELOPT)} or {MIXED} of these. Quantise the model with one of them"
            )
    algorithms = sorted({str(own).upper() for own in found.values()})
    block = {"weight_block_size": MODELOPT_BLOCK} if "FP8_PB_WO" in algorithms else {}
    return {**described, "quant_method": "modelopt", "algorithms": algorithms, **block}


def modelopt_bits(described: Mapping[str, Any]) -> set[int]:
    """Return the bits of a ModelOpt model's codes, as `quantization_of` describes it."""
    return {MODELOPT[algorithm] for algorithm in described["algorithms"]}


def require_method(model: str | Path, method: str) -> None:
    """Raise `ValueError` for a model whose files are not quantised with `method`.

    `method`: as the files name it, or as vLLM does. `model`: a directory, a GGUF file, or the name
    of an architecture, which has no files.
    """
    described = quantization_of(model) if is_model(model) else None
    if described is None:
        raise ValueError(
            f"'{model}' is not quantised, quantization='{method}' asks for a model that is: leave "
            "it out; fewer bits are a plan's (llmpq-algo --bits 4, make_plan(bits='4'))"
        )
    said = {str(described.get("quant_method"))}
    if "packing_format" in described:
        said.add("auto-round")
    names = {*said, *(name for own in said for name in OTHER_NAMES.get(own, ()))}
    if described.get("algorithms"):
        names |= {"modelopt-fp4", "petit-nvfp4"} if 4 in modelopt_bits(described) else set()
        names |= {"modelopt-mixed"} if str(described["quant_algo"]).upper() == MIXED else set()
    if method.lower().replace("_", "-") not in {name.replace("_", "-") for name in names}:
        raise ValueError(
            f"'{model}' is quantised with {' or '.join(sorted(said))}, not with "
            f"quantization='{method}': leave it out, a model runs in the form of its files"
        )


def layout_of(described: Mapping[str, Any]) -> str | None:
    """Return what GPTQ's or AWQ's codes are said to lie like; None where nothing is said.

    The older key counts where it is given, as in Transformers.
    """
    method = str(described.get("quant_method"))
    if method == "awq" and described.get("backend") == "llm-awq":
        return "llm-awq"
    given = (described.get(key) for key in LAYOUT_KEYS.get(method, ()))
    return next((str(layout).lower() for layout in given if layout is not None), None)


def is_centred(described: Mapping[str, Any], has_zeros: bool) -> bool:
    """Whether integer codes are said to have no zero points; `has_zeros`: tensors beside them."""
    method = described.get("quant_method")
    if method == "gptq":
        return described.get("sym") is True
    if method == "awq":
        return described.get("zero_point") is False
    return not has_zeros


def fp8_block(described: Mapping[str, Any]) -> Any:
    """Return the rows and columns that share an FP8 scale; None where config.json says none."""
    given = described.get("weight_block_size")
    groups = described.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) and given is None else ():
        given = given or (group.get("weights") or {}).get("block_structure")
    return given


def is_kept_block(block: Any) -> bool:
    """Whether FP8 codes with scales of such blocks (None: a tensor's or a channel's) are kept."""
    if block is None:
        return True
    whole = isinstance(block, list) and len(block) == 2 and all(type(b) is int for b in block)
    return whole and block[0] > 0 and block[1] > 0 and block[1] % FP8_COLUMNS == 0


def require_read(described: Mapping[str, Any], directory: object) -> None:
    """Raise `ValueError` for a quantised form that llmpq does not read, by what it is."""
    method = described.get("quant_method")
    if method is None and {"bits", "group_size"} <= described.keys():
        raise ValueError(
            f"'{directory}' is quantised in MLX's form (config.json, 'quantization'), which llmpq "
            "does not read; start from the unquantised model"
        )
    if method not in METHODS:
        raise ValueError(
            f"'{directory}': quantization method '{method}' is not supported; expected one of "
            f"{', '.join(METHODS)}"
        )
    for key, what in CHANGES.items():
        if is_given(described.get(key)):
            raise ValueError(
                f"'{directory}': config.json, quantization_config: '{key}' asks for {what}, which "
                "llmpq does not know; quantise without, or with llmpq-quantize"
            )
    layouts, layout = FORMATS.get(method), layout_of(described)
    given = {key: described.get(key) for key in LAYOUT_KEYS.get(method, ())}
    stated = {str(value).lower() for value in given.values() if value is not None}
    if layouts and (len(stated) > 1 or not {layout or layouts[0]} <= set(layouts)):
        words = ", ".join(f"{key}='{value}'" for key, value in given.items() if value is not None)
        raise ValueError(
            f"'{directory}': config.json, quantization_config: {method.upper()}'s "
            f"{words or layout} is not supported; expected {' or '.join(layouts)}. Convert "
            "the checkpoint, or quantise it anew"
        )
    others = described.get("dynamic")
    for name, own in others.items() if method == "gptq" and isinstance(others, Mapping) else ():
        for key in ("bits", "group_size", "desc_act"):
            if isinstance(own, Mapping) and own.get(key, described.get(key)) != described.get(key):
                raise ValueError(
                    f"'{directory}': config.json, quantization_config: 'dynamic' gives '{name}' "
                    f"{key}={own[key]!r}, others have {described.get(key)!r}; llmpq reads one for "
                    "all. Quantise the model with one"
                )
    if method == "bitsandbytes" and is_given(described.get("load_in_8bit")):
        raise ValueError(
            f"'{directory}': bitsandbytes of 8 bits (LLM.int8) is not supported; expected 4 bits "
            "(load_in_4bit), or start from the unquantised model"
        )
    bits = described.get("bits", described.get("w_bit"))
    if method == "awq" and bits is not None and bits != 4:
        raise ValueError(f"'{directory}': AWQ of {bits} bits is not supported; expected 4")
    sparse = described.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        raise ValueError(
            f"'{directory}': config.json, quantization_config: sparse weights "
            f"(format '{sparse.get('format')}') are not supported; use the dense checkpoint"
        )


def stated_group(described: Mapping[str, Any]) -> int | None:
    """Return the channels of a group as GPTQ's and AWQ's words say; None: one group, or unsaid.

    The number of groups does not tell: 160 channels have two groups of 80, and of 128.
    """
    found = described.get("group_size")
    return found if type(found) is int and found > 0 else None
