"""SmolLM3: Llama's layer; every fourth layer's queries and keys have no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.rotary_families import FULL, SLIDING, layer_kinds, rotary_fields, windows


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = {**rotary_fields(config), **llama.bias_fields(config)}
    bare = _without_positions(config)
    windowed = flag(config, "use_sliding_window", default=False)
    windowed = windowed and config.get("sliding_window") is not None
    default = [SLIDING if windowed and i in bare else FULL for i in range(base["num_layers"])]
    # Layers that `layer_types` calls sliding are so without `use_sliding_window`, too.
    kinds = layer_kinds(config, default)
    own = {"windows": windows(config, kinds)} if SLIDING in kinds else {}
    return {**base, "without_positions": bare, **own}


def _without_positions(config: Config) -> tuple[int, ...]:
    """Return the layers that `no_rope_layers` gives a 0, or every `no_rope_layer_interval`-th."""
    count = size(config, "num_hidden_layers")
    given = config.get("no_rope_layers")
    every = size(config, "no_rope_layer_interval", default=4)
    rotated = [(i + 1) % every != 0 for i in range(count)] if given is None else given
    if not isinstance(rotated, list) or len(rotated) < count or not set(rotated) <= {0, 1}:
        raise ValueError(
            f"config.json: 'no_rope_layers' must give each of {count} layers 1 (with positions) or "
            "0; correct it or download config.json again"
        )
    return tuple(i for i in range(count) if not rotated[i])


FAMILY = replace(llama.FAMILY, name="smollm3", model_types=("smollm3",), fields=fields)
