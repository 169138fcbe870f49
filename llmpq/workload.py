"""The job to run: how many requests, how long, on what arithmetic.

Symbols: B batch (requests), s prompt length, n tokens to generate, all per request and padded to
the longest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from llmpq.file_form import FileForm
from llmpq.precision import KVPrecision

CHUNK_TOKENS = 512
"""Tokens of one prompt that a step computes, where nothing else is chosen."""

Dtype = Literal["float16", "bfloat16", "float32"]
DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
_SHORT_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
"""vLLM's other names, and those that people write."""


def full_dtype(name: str) -> str:
    """Return the name that we use of a dtype's; torch's own (`torch.float16`) are read, too."""
    short = name.removeprefix("torch.")
    return _SHORT_DTYPES.get(short, short)


def chunk_tokens(prompt_len: int, chunk: int | None) -> int:
    """Return the tokens of a prompt that its first step computes, which no later one exceeds.

    `chunk`: tokens of a step at most, none for whole prompts.
    """
    return prompt_len if chunk is None else min(chunk, prompt_len)


def num_chunks(prompt_len: int, chunk: int | None) -> int:
    """Return how many steps a prompt takes."""
    return -(-prompt_len // chunk_tokens(prompt_len, chunk))


@lru_cache(maxsize=1024)  # planners ask for the same again and again
def prompt_chunks(prompt_len: int, chunk: int | None) -> tuple[tuple[int, int], ...]:
    """Return (first position, tokens) of each step that a prompt takes (chunked prefill)."""
    size = chunk_tokens(prompt_len, chunk)
    return tuple((at, min(size, prompt_len - at)) for at in range(0, prompt_len, size))


class Workload(FileForm):
    """LLM-PQ's offline job: B prompts of s tokens, n new tokens each."""

    batch: int = Field(gt=0)
    """Requests in flight."""
    prompt_len: int = Field(gt=0)
    """Tokens of a prompt, at most."""
    gen_len: int = Field(gt=0)
    """New tokens of a request, at most."""
    kv: KVPrecision = KVPrecision.KV16
    """Bits of the KV cache."""
    dtype: Dtype = "float16"
    """Dtype of activations, of unquantised weights and of the 16-bit KV cache (float32 allowed)."""

    @property
    def requests(self) -> str:
        """How many requests there are, in words."""
        return f"{self.batch} request{'' if self.batch == 1 else 's'}"

    @property
    def max_len(self) -> int:
        """Tokens of one request that are cached at most (the last one never is)."""
        return self.prompt_len + self.gen_len - 1

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one activation."""
        return DTYPE_BYTES[self.dtype]
