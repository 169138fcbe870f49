"""Short prompts of a whole model as CUDA graphs: the device does not wait for the host.

A prompt of 512 tokens is 300 launches, for which the host may take three times what the GPU needs.
A width (a prompt's tokens with its padding) is captured when it comes for the second time, and only
while the GPU has memory that no plan counts on; longer prompts and several rows keep a GPU busy as
they come. Graphs of all widths share the memory and the stream of the decode steps' graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.runtime.backends.gpu.cuda_graphs import DecodeGraphs, StepOutput
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import StepMessage

LONGEST = 1024
"""Tokens from which a GPU needs longer for a prompt than the host."""
MOST_WIDTHS = 16
"""Widths that are captured at most."""
SPARE_BYTES = 1 << 30
"""Free memory below which no width is captured: a graph keeps its temporaries."""


class _OneWidth(DecodeGraphs):
    """Fresh prompts of one row, padded to one width."""

    def __init__(self, model: StageModel, kv: KVCache, width: int, **options: Any) -> None:
        self.width, self.fields = width, 2 + width
        super().__init__(model, kv, **options)

    def _table(self, message: StepMessage) -> list[Sequence[int]]:
        (tokens,) = message.tokens
        padded = [*tokens, *[0] * (self.width - len(tokens))]
        return [message.slots, message.num_new, *([token] for token in padded)]

    def _state(self) -> list[Tensor]:
        return []

    def _forward(self, num_rows: int, hidden_BQh: Tensor | None) -> StepOutput:
        given = self._given(num_rows)
        slots_B, count_B = given[0], given[1]
        step = Step(
            slots_B=slots_B,
            start_B=torch.zeros_like(slots_B),
            num_new_B=count_B,
            q_len=self.width,
            max_end=self.width,
            fresh=True,
            runs=(),
        )
        y = self._model(given[2:].reshape(1, -1), step, self._kv, last_only=True)
        return StepOutput(logits_BV=self._model.logits(y, step))


class PromptGraphs:
    """The widths of short prompts that have come before, captured."""

    def __init__(self, decode: DecodeGraphs, *, capture: bool, **options: Any) -> None:
        """`decode` runs the same stage's other steps; `options` are those of its graphs."""
        self._decode, self._options = decode, options | {"capture": capture, "max_rows": 1}
        self._on = capture and decode._kv.plain is decode._kv
        self._seen: set[int] = set()
        self._widths: dict[int, _OneWidth] = {}

    def takes(self, message: StepMessage, width: int) -> bool:
        """Whether a step of prompts of a width is one that has a graph, or gets one now."""
        if not self._on or message.num_rows != 1 or max(message.starts) > 0 or width > LONGEST:
            return False
        if width in self._widths:
            return True
        if width not in self._seen:
            self._seen.add(width)
            return False
        if len(self._widths) == MOST_WIDTHS or not self._spare():
            return False
        made = _OneWidth(self._decode._model, self._decode._kv, width, **self._options)
        made.share(self._decode)
        self._widths[width] = made
        return True

    def logits_BV(self, message: StepMessage, width: int) -> Tensor:
        """Return the logits after a prompt's last token, overwritten by the next of its width."""
        logits_BV = self._widths[width].run(message, None).logits_BV
        assert logits_BV is not None
        return logits_BV

    def _spare(self) -> bool:
        device = self._options["device"]
        return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= SPARE_BYTES
