"""How many keys a token attends to: all before it, or as many as a window or an indexer leaves.

Costs take all layers of a model as equal, so these are means over its layers that cache keys. T
tokens stand in the cache, the new one among them; windows are (w tokens, share of those layers).

    keys   min(T, w) of a layer                                    what a decode step reads
    pairs  T^2 / 2, or w T - w^2 / 2 of T > w tokens of a window   what a prompt of T computes

An indexer (DeepSeek V3.2, GLM-5) reads its own key of every token, attention the latents of the w
that it chooses: a window over a share of what a key takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from llmpq.models.model_spec import ModelSpec

if TYPE_CHECKING:  # --help opens without it
    import numpy as np
    from numpy.typing import NDArray

Windows = tuple[tuple[int, float], ...]
"""(tokens, share of what keys take) that is taken for so many keys at most: of the layers with a
cache those that see the last tokens only, or of a layer what is not the indexer's."""
Tokens = TypeVar("Tokens", float, "NDArray[np.float64]")


def windows_of(spec: ModelSpec, layers: Iterable[int] | None = None) -> Windows:
    """Return the windows of a model's layers that cache keys, or of some of them."""
    chosen = range(spec.num_layers) if layers is None else layers
    caching = [layer for layer in chosen if spec.has_kv(layer)]
    counts = Counter(spec.windows[layer] for layer in caching if spec.is_windowed(layer))
    return tuple((window, count / len(caching)) for window, count in sorted(counts.items()))


def chosen_keys(spec: ModelSpec, *, of_pairs: bool) -> Windows:
    """Return what an indexer leaves of keys on a GPU; a CPU reads and multiplies them all.

    Its share is of the bytes of keys, or (`of_pairs`) of the operations of prompts.
    """
    if spec.indexer is None or spec.latent is None:
        return ()
    share = spec.latent.dim / spec.head_dim
    if of_pairs:
        share = chosen_pair_flops(spec) / (chosen_pair_flops(spec) + index_pair_flops(spec))
    return ((spec.indexer.topk, share),)


def chosen_pair_flops(spec: ModelSpec) -> float:
    """Return the operations of a query and a chosen key: a score and a sum of latents a head."""
    return 0.0 if spec.latent is None else 4.0 * spec.heads * spec.latent.dim


def index_pair_flops(spec: ModelSpec) -> float:
    """Return the operations of a query and any key in the indexer: a score a head."""
    return 0.0 if spec.indexer is None else 2.0 * spec.indexer.heads * spec.indexer.dim


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
