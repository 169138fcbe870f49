"""What of a stage decides how large its temporaries are, beside the model and the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.precision import Precision


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """Its place in the pipeline, its layers' precisions, its micro-batches, and its device."""

    precisions: Sequence[Precision]
    """Of its layers in order; for temporaries alone, one of each that they have."""
    first: bool = False
    last: bool = False
    prefill_microbatch: int = 1
    """Requests whose prompts are computed at a time."""
    decode_microbatch: int = 1
    prefill_chunk: int | None = None
    """Tokens of a prompt in a step at most, None for whole prompts."""
    on_gpu: bool = False
    unpacks: bool = True
    """Whether long prompts meet a packed weight as one dense matrix (a GPU's)."""
