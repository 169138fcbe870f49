"""What a plan with a KV slot a request allows: slots, lengths and micro-batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmpq.runtime.request import ContextLengthError, Request


@dataclass(frozen=True, kw_only=True)
class SlotLimits:
    """What the plan allows: slots, lengths and micro-batch sizes."""

    num_slots: int
    prompt_len: int
    """Longest prompt the plan's memory was computed for."""
    max_len: int
    """Tokens one KV slot holds."""
    prefill_microbatch: int
    decode_microbatch: int
    num_stages: int = 1
    batching: Literal["continuous", "static"] = "continuous"
    """`static` refills slots only when every running request has ended (for comparison)."""

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self.max_len + 1

    def check(self, request: Request) -> None:
        """Raise `ValueError` if a request can never run under these limits."""
        length = len(request.prompt)
        if length == 0:
            raise ValueError("the prompt has no tokens; expected at least one")
        if length > self.prompt_len:
            raise ContextLengthError(
                f"the prompt is too long: it has {length} tokens, the plan was made for prompts of "
                f"at most {self.prompt_len}; re-plan with llmpq-algo --prompt-len {length}"
            )
        if request.max_new < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_new}")
        if length + request.max_new - 1 > self.max_len:
            raise ContextLengthError(
                f"a prompt of {length} tokens and {request.max_new} new ones need "
                f"{length + request.max_new - 1} cache positions, the plan has {self.max_len} a "
                f"slot; ask for at most {self.max_len - length + 1} tokens or re-plan with a "
                "larger --gen-len"
            )
