"""What config.json says of how a model is quantised: forms that are read, and what is refused.

The names of tensors tell a layer's form; these words tell what the names do not, and would change
what the model computes if nobody heeded them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmpq.families.common.config_values import is_given

METHODS = (
    *("compressed-tensors", "gptq", "awq", "llmpq", "fp8", "fbgemm_fp8", "mxfp4"),
    "bitsandbytes",
)
"""Values of `quant_method` that are read."""
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""Method -> the layouts of codes that are read."""
LAYOUT_KEYS = {"gptq": "checkpoint_format", "awq": "version"}
"""Method -> the key that names a layout."""
CHANGES = {
    "transform_config": "rotations of activations while it runs",
    "rotation": "rotations of activations while it runs",
    "is_marlin_format": "codes in Marlin's order",
    "use_exllama_v2_order": "codes in ExLlama's order",
}
"""Keys that are off where nothing is missed -> what they stand for."""


FP8_COLUMNS = 64
"""What the columns of a block of FP8 weights are a multiple of, where codes are kept."""

BITSANDBYTES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
"""What follows `NAME.weight.` in the name of what says how bitsandbytes quantised a weight."""

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
"""Where a tensor's name says which layer it is of."""


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
    """Raise `ValueError` for a quantised form that nobody here reads, by what it is."""
    method = described.get("quant_method")
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
    layouts, key = FORMATS.get(method), LAYOUT_KEYS.get(method, "")
    layout = described.get(key)
    if layouts and layout is not None and str(layout).lower() not in layouts:
        raise ValueError(
            f"'{directory}': config.json, quantization_config: {key}='{layout}' is not supported; "
            f"expected {' or '.join(layouts)}. Convert the checkpoint, or quantise it anew"
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
