"""EXAONE 4: OLMo 2's norms behind attention and MLP, Qwen3's norms of heads, windows.

    x += norm(o(attention(rope(norm(q)), rope(norm(k)), v)));  x += norm(down(silu(gate) * up))

Where layers have windows, those that see all tokens have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import olmo2
from llmpq.families.common.config_values import Config, size
from llmpq.families.common.rotary_families import (
    SLIDING,
    alternating,
    layer_kinds,
    rotary_fields,
    window_size,
)


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config), "norm_order": "post", "qk_norm": True}
    window = window_size(config)
    pattern = config.get("sliding_window_pattern")  # where layer_types does not say it
    listed = config.get("layer_types") is not None
    if not window:
        layer_kinds(config, [])
        return base
    kinds = layer_kinds(config, [] if listed else alternating(config, _pattern(pattern)))
    full = tuple(i for i, kind in enumerate(kinds) if kind != SLIDING)
    seen = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return {**base, "windows": seen if any(seen) else (), "without_positions": full}


def _pattern(given: object) -> int:
    """Return of how many layers one sees all tokens: a number, or the length of "LLLG"."""
    if not isinstance(given, str):
        return size({"sliding_window_pattern": given}, "sliding_window_pattern", default=4)
    if given != "L" * (len(given) - 1) + "G":
        raise ValueError(
            f"config.json: sliding_window_pattern='{given}' is not supported; expected layers with "
            "a window (L) and one without (G) behind them, as LLLG"
        )
    return len(given)


FAMILY = replace(
    olmo2.FAMILY, name="exaone4", model_types=("exaone4", "exaone4_5_text"), fields=fields
)
