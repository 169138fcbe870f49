"""What an engine has room for, and which requests can therefore never run. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.errors import ContextLengthError
from llmpq.precision import KVPrecision
from llmpq.runtime.requests.request import Request, too_long
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, TAIL_TOKENS, spanned_blocks

ROUND_TOKENS = 64
"""Steps of prompts alone on several stages have a multiple of so many tokens, as GPUs pad them."""
MORE_SHARES = 1.5
"""Times the best number of shares where a step's floor and its tokens add up: where the longer of
the two counts, three times as many are best."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """What there is room for."""

    num_blocks: int
    """Blocks of the pool, as many on every stage."""
    kv: KVPrecision = KVPrecision.KV16
    window: int = 0
    """Tokens that the layers with a window see; 0 where all layers share one pool."""
    window_blocks: int = 0
    """Blocks of the pool of the layers with a window."""
    max_rows: int
    """Requests that may run at once."""
    max_len: int
    """Tokens of a prompt and its answer (the model's positions or less)."""
    max_positions: int | None = None
    """The model's, if known, for what is said of prompts that are too long."""
    step_tokens: int
    """Tokens of a step, unless rows that decode, and their drafts, are more."""
    mixed_tokens: int | None = None
    """Tokens of a step while requests decode, if fewer: their next tokens wait for it."""
    fill_tokens: float = 0.0
    """Tokens of a prompt that take a stage as long as a step takes at least; 0: not known."""
    prompt_tokens: int | None = None
    """Tokens of one prompt in a step at most, if fewer: other prompts go beside it."""
    decode_rows: int
    """Decoding rows of a step at most."""
    num_stages: int = 1
    prefix_cache: bool = True
    snapshots: int = 0
    """States of recurrent layers that are kept of prefixes; 0 where layers have none."""
    host_blocks: int = 0
    """Blocks of preempted requests that hosts keep until those go on; the others' are computed
    again."""
    tokens_ahead: int = 1
    """Steps of one request that may be under way: beyond 1 its next token is asked for before the
    last one is known, and thrown away if that ended the request."""

    @property
    def tail(self) -> int:
        """Tokens behind a packed block that a prefix hit needs, too."""
        return 0 if self.kv is KVPrecision.KV16 else TAIL_TOKENS

    @property
    def row_tokens(self) -> int:
        """Tokens of one row of a step at most: beside its window, a request's fit the pool."""
        most = min(self.step_tokens, self.prompt_tokens or self.step_tokens)
        if not self.window:
            return most
        return min(most, (self.window_blocks - 1) * BLOCK_TOKENS + 2 - self.window)

    def prompt_tokens_of_step(self, *, waiting: int, decoding: int) -> int:
        """Return the tokens of a step that has prompts, while so many requests decode.

        `waiting`: tokens of prompts to compute. Where none decodes, a single stage takes all that
        a step may have. Of D stages each computes a share of them while the others have the next:
        W tokens in C shares take C + D - 1 times as long as fill_tokens + W / C tokens, which is
        least for C = sqrt(W (D - 1) / fill_tokens), if the two add up.
        """
        if decoding:
            return min(self.step_tokens, self.mixed_tokens or self.step_tokens)
        others = self.num_stages - 1
        if not others or not self.fill_tokens:
            return self.step_tokens
        shares = max(1, round(MORE_SHARES * math.sqrt(waiting * others / self.fill_tokens)))
        share = -(-waiting // (shares * ROUND_TOKENS)) * ROUND_TOKENS
        return max(1, min(self.step_tokens, share))

    @property
    def room(self) -> int:
        """Tokens of the longest request: prompt and answer (its last token is never cached)."""
        return min(self.max_len, self._cached + 1)

    @property
    def _cached(self) -> int:
        """Tokens that the pool's blocks hold of one request."""
        full = self.num_blocks * BLOCK_TOKENS
        return full if self.kv is KVPrecision.KV16 else full + BLOCK_TOKENS + HOLDBACK_TOKENS

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self.room

    def __post_init__(self) -> None:
        if self.host_blocks and (self.window or self.kv is not KVPrecision.KV16):
            raise ValueError("hosts keep blocks of 16 bits and of layers without windows alone")
        if self.window and self.window_blocks < spanned_blocks(self.window, BLOCK_TOKENS):
            raise ValueError(
                f"a window of {self.window} tokens needs a pool of "
                f"{spanned_blocks(self.window, BLOCK_TOKENS)} blocks, got {self.window_blocks}"
            )

    def check(self, request: Request) -> None:
        """Raise `ValueError` if a request can never run under these limits.

        A prompt that fills the model's positions may have one token, which is not cached: it is
        scored so.
        """
        length = len(request.prompt)
        if length == 0:
            raise ValueError("the prompt has no tokens; expected at least one")
        if request.max_new < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_new}")
        if length == self.room <= self._cached and request.max_new == 1:
            return
        if length >= self.room:
            raise too_long(length, self.room, max_positions=self.max_positions)
        if length + request.max_new > self.room:
            raise ContextLengthError(
                f"a prompt of {length} tokens and {request.max_new} new ones exceed the {self.room}"
                f" there is room for; ask for at most {self.room - length} tokens"
            )


def max_in_flight(num_stages: int) -> int:
    """Return how many micro-batches may be under way: each stage computes one and queues one."""
    return 1 if num_stages == 1 else 2 * num_stages


def max_ahead(num_stages: int) -> int:
    """Return how many may be under way where the host need not know the tokens to go on."""
    return 2 if num_stages == 1 else 4 * num_stages
