"""To how many tokens the engine pads a step, so that its products have few shapes.

A product of a new shape takes a CPU twice its time, and a GPU captures a graph for every size of a
step. Padding is computed and never read; costs are measured and priced with it.
"""

from __future__ import annotations

EXACT_TOKENS = 16
"""Steps of up to so many tokens are not padded on a CPU."""
CAPTURED_TOKENS = 2048
"""Padded tokens up to which a GPU replays a step with chunks from a graph; longer ones keep the GPU
busy without one.

H200, a layer of Llama-3.1-8B at 4 bits, us captured and not: 8 x 160 tokens 894, 1812 (the host's);
8 x 256 1412, 1404; 1 x 2048 1477, 1435; 1 x 4096, whose attention has a kernel of its own if it is
not captured, 3016, 2813."""


def cpu_padded(tokens: int) -> int:
    """Return the tokens of a CPU's step, padding included: at most an eighth more."""
    if tokens <= EXACT_TOKENS:
        return tokens
    rung = 1 << max(0, tokens.bit_length() - 4)
    return -(-tokens // rung) * rung


def gpu_padded(tokens: int) -> int:
    """Return the tokens of a GPU's step with chunks of prompts or drafts, padding included."""
    if tokens <= 64:
        return max(8, 1 << (tokens - 1).bit_length())
    width = 64 if tokens <= 512 else 256
    return -(-tokens // width) * width
