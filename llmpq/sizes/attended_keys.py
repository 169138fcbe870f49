"""How many keys a token attends to: all before it, or the last ones where a layer has a window.

Costs take all layers of a model as equal, so these are means over its layers that cache keys. T
tokens stand in the cache, the new one among them; windows are (w tokens, share of those layers).

    keys   min(T, w) of a layer                                    what a decode step reads
    pairs  T^2 / 2, or w T - w^2 / 2 of T > w tokens of a window   what a prompt of T computes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from llmpq.model_spec import ModelSpec

if TYPE_CHECKING:  # --help opens without it
    import numpy as np
    from numpy.typing import NDArray

Windows = tuple[tuple[int, float], ...]
"""(tokens, share of the layers with a cache) of layers that see the last tokens only."""
Tokens = TypeVar("Tokens", float, "NDArray[np.float64]")


def windows_of(spec: ModelSpec, layers: Iterable[int] | None = None) -> Windows:
    """Return the windows of a model's layers that cache keys, or of some of them."""
    chosen = range(spec.num_layers) if layers is None else layers
    caching = [layer for layer in chosen if spec.has_kv(layer)]
    counts = Counter(spec.windows[layer] for layer in caching if spec.is_windowed(layer))
    return tuple((window, count / len(caching)) for window, count in sorted(counts.items()))


def attended_keys(tokens: Tokens, windows: Windows) -> Tokens:
    """Return the keys that a token sees which has `tokens` in its cache, itself included."""
    if not windows:
        return tokens
    import numpy as np

    unseen = sum(share * np.maximum(0.0, tokens - window) for window, share in windows)
    return tokens - unseen


def twice_the_pairs(tokens: Tokens, windows: Windows) -> Tokens:
    """Return twice the pairs of query and key of a prompt of so many tokens."""
    if not windows:
        return tokens * tokens
    import numpy as np

    unseen = sum(share * np.maximum(0.0, tokens - window) ** 2 for window, share in windows)
    return tokens * tokens - unseen


def keys_before_chunk(start: Tokens, length: float, windows: Windows) -> Tokens:
    """Return how many of the `start` tokens before a chunk a token of it sees, on average."""
    if not windows or length == 0:
        return start
    pairs = twice_the_pairs(start + length, windows) - twice_the_pairs(start, windows)
    return (pairs - twice_the_pairs(length, windows)) / (2 * length)
