"""A low-bit KV cache for all layers of a stage on a CPU.

    plan(rows)       once per step: what the host knows becomes tensors
    run(plan, ...)   once per layer: append the step's keys and values, return its attention

One new token a row goes by our own code (kernels/native), more by plain torch over dequantised
blocks. What a query sees packed depends on its position alone, so the next step starts where the
caller says: it may forget the newest HOLDBACK tokens, or everything.

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv import reference
from llmpq.kernels.kv.low_bit import native_attend
from llmpq.kernels.kv.step_view import Rows, StepView, look
from llmpq.kernels.kv.storage import allocate_layer, contiguous_table
from llmpq.sizes.kv_format import packed_blocks


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, ready for every layer."""

    rows: Rows
    q_len: int

    @cached_property
    def view(self) -> StepView:
        """The step as plain torch sees it, derived once for all layers."""
        return look(self.rows, self.q_len)

    @cached_property
    def last_B(self) -> Tensor:
        """Position of each row's last token, -1 of a row that has none."""
        return self.rows.start_B + self.rows.num_new_B - 1


class QuantizedKVCache:
    """Keys and values of `slots` requests of up to `max_len` tokens, `num_layers` layers."""

    def __init__(
        self,
        fmt: KVFormat,
        *,
        num_layers: int,
        kv_heads: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        table_SN: Tensor | None = None,
        pages: int | None = None,
    ) -> None:
        self.fmt, self.kv_heads, self.max_len = fmt, kv_heads, max_len
        self.device = torch.device(device)
        blocks = packed_blocks(max_len)
        if table_SN is None:
            table_SN = contiguous_table(slots, blocks, self.device)
        if table_SN.shape != (slots, blocks) or table_SN.dtype != torch.int32:
            raise ValueError(
                f"the page table must be int32 [{slots}, {blocks}] for {slots} slots of {max_len} "
                f"tokens, got {table_SN.dtype} {list(table_SN.shape)}"
            )
        self.table_SN = table_SN
        self.layers = [
            allocate_layer(
                fmt,
                pages=pages if pages is not None else slots * blocks,
                slots=slots,
                kv_heads=kv_heads,
                dtype=dtype,
                device=self.device,
            )
            for _ in range(num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks, scales and rings, all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def plan(
        self,
        slots_B: Tensor,
        start_B: Tensor,
        num_new_B: Tensor,
        *,
        q_len: int,
        max_end: int,
    ) -> StepPlan:
        """Prepare a step; `max_end` is the host's largest start + count."""
        if max_end > self.max_len:
            raise ValueError(
                f"a step ends at token {max_end}, the KV cache holds {self.max_len} a request; "
                "plan a longer workload or send shorter requests"
            )
        return StepPlan(
            rows=Rows(slots_B=slots_B, start_B=start_B, num_new_B=num_new_B),
            q_len=q_len,
        )

    def run(
        self,
        plan: StepPlan,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        scoring: reference.Scoring,
    ) -> Tensor:
        """Append the step's keys and values to a layer and return its attention [B, Q, H, D]."""
        layer_tensors, rule = self.layers[layer], scoring.rule
        single = q_BQHD.shape[1] == 1 and not rule.chunked and rule.chosen is None
        if single and native_attend.native_takes(self.fmt, layer_tensors, q_BQHD):
            self.append(plan, layer, k_BQGD, v_BQGD)
            return native_attend.attend_packed(
                self.fmt,
                layer_tensors,
                self.table_SN,
                q_BQHD[:, 0],
                slots_B=plan.rows.slots_B,
                last_B=plan.last_B,
                scoring=scoring,
            )[:, None]
        return reference.append_and_attend(
            self.fmt,
            layer_tensors,
            self.table_SN,
            q_BQHD,
            k_BQGD,
            v_BQGD,
            plan.rows,
            scoring=scoring,
            view=plan.view,
        )

    def append(self, plan: StepPlan, layer: int, k_BQGD: Tensor, v_BQGD: Tensor) -> None:
        """Write the step's tokens; pack completed blocks."""
        tensors = self.layers[layer]
        reference.append(self.fmt, tensors, self.table_SN, k_BQGD, v_BQGD, plan.rows, plan.view)
