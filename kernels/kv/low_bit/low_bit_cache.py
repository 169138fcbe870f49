"""A low-bit KV cache for all layers of a stage: kernels on a GPU, plain torch elsewhere.

    plan(rows)       once per step: what the host knows becomes device tensors and launch sizes
    run(plan, ...)   once per layer: append the step's keys and values, return its attention

Which way a step goes depends on its shape alone:

    fresh prompt           torch's causal attention over the 16-bit tokens at hand, then one packing
                           pass; `exact_prompt=False` gives prompts the packed view instead, query
                           by query, which is what perplexity measurements want
    up to 16 new tokens    the decode kernels, of 32, 64, 128 and 256 channels or of any number
                           (latents); on CPUs one new token by our own code
    longer chunks          plain torch over dequantised blocks

Truncation needs no work: positions alone say what is packed, so the next step starts where the
caller says. It may forget the newest HOLDBACK tokens, or everything.

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv import reference
from llmpq.kernels.kv.launch_plan import MAX_Q_LEN, plan_attend
from llmpq.kernels.kv.low_bit import native_attend
from llmpq.kernels.kv.step_view import Rows, StepView, look
from llmpq.kernels.kv.storage import DeviceRows, allocate_layer, contiguous_table
from llmpq.sizes.kv_format import packed_blocks

COLUMN_CHUNKS = 128
"""Of 8 query heads x new tokens, for one key-value head, at most."""

KERNEL_HEAD_DIMS = (32, 64, 128, 256)
"""head_dims that attend.py and append.py take; any_size_attend.py takes the others."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, ready for every layer."""

    rows: Rows
    q_len: int
    exact_prompt: bool
    fresh: bool
    max_end: int
    device_rows: DeviceRows

    @cached_property
    def view(self) -> StepView:
        """The step as plain torch sees it, derived once for all layers."""
        return look(self.rows, self.q_len, exact_prompt=self.exact_prompt)

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
        exact_prompt: bool = True,
    ) -> None:
        self.fmt, self.kv_heads, self.max_len = fmt, kv_heads, max_len
        self.device = torch.device(device)
        self.exact_prompt = exact_prompt
        self.paged = table_SN is not None
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

        # Counters the programs of a step draw from (attend.py), always left at zero.
        self.tickets = torch.zeros(
            slots * kv_heads * COLUMN_CHUNKS, dtype=torch.int32, device=self.device
        )

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks, scales and rings, all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def uses_kernels(self) -> bool:
        """Whether kernels run that multiply codes as they are."""
        return self.device.type == "cuda" and self.fmt.head_dim in KERNEL_HEAD_DIMS

    @property
    def gathers(self) -> bool:
        """Whether the kernels for heads of any size run; plain torch if neither do."""
        return self.device.type == "cuda" and not self.uses_kernels

    def plan(
        self,
        slots_B: Tensor,
        start_B: Tensor,
        num_new_B: Tensor,
        *,
        q_len: int,
        fresh: bool,
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
            exact_prompt=self.exact_prompt,
            fresh=fresh,
            max_end=max_end,
            device_rows=DeviceRows(
                slots=slots_B.to(torch.int32),
                starts=start_B.to(torch.int32),
                counts=num_new_B.to(torch.int32),
            ),
        )

    def run(
        self,
        plan: StepPlan,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        *,
        scale: float,
        alibi_slopes_H: Tensor | None = None,
        inv_freq: Tensor | None = None,
        rule: reference.ScoreRule = reference.EVERYTHING,
    ) -> Tensor:
        """Append the step's keys and values to a layer and return its attention [B, Q, H, D].

        With `inv_freq` queries and keys come unrotated; only steps that `rotates` take it.
        """
        if inv_freq is not None:
            q_BQHD = self._rope_append(plan, layer, q_BQHD, k_BQGD, v_BQGD, inv_freq)
            return self._decode(plan, layer, q_BQHD, scale, alibi_slopes_H, rule)
        if plan.fresh and self.exact_prompt and rule.is_plain:
            self.append(plan, layer, k_BQGD, v_BQGD)
            return prompt_attention(
                q_BQHD, k_BQGD, v_BQGD, scale=scale, alibi_slopes_H=alibi_slopes_H
            )
        if self.uses_kernels and q_BQHD.shape[1] <= MAX_Q_LEN:
            self.append(plan, layer, k_BQGD, v_BQGD)
            return self._decode(plan, layer, q_BQHD, scale, alibi_slopes_H, rule)
        layer_tensors = self.layers[layer]
        if self.gathers and q_BQHD.shape[1] <= MAX_Q_LEN:
            self.append(plan, layer, k_BQGD, v_BQGD)
            return self._gather(plan, layer, q_BQHD, scale, alibi_slopes_H, rule)
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
                scale=scale,
                rule=rule,
                alibi_slopes_H=alibi_slopes_H,
            )[:, None]
        return reference.append_and_attend(
            self.fmt,
            self.layers[layer],
            self.table_SN,
            q_BQHD,
            k_BQGD,
            v_BQGD,
            plan.rows,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            view=plan.view,
            rule=rule,
        )

    def rotates(self, q_len: int, *, fresh: bool) -> bool:
        """Whether a step's append can rotate queries and keys in its own launch."""
        return self.uses_kernels and q_len <= MAX_Q_LEN and not (fresh and self.exact_prompt)

    def append(
        self,
        plan: StepPlan,
        layer: int,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        inv_freq: Tensor | None = None,
    ) -> None:
        """Write the step's tokens (rotated first, where it `rotates`); pack completed blocks."""
        tensors = self.layers[layer]
        if self.gathers and inv_freq is None and k_BQGD.shape[1] <= MAX_Q_LEN:
            _append_any_size().append_any_size(
                self.fmt, tensors, self.table_SN, k_BQGD, v_BQGD, plan.device_rows
            )
            return
        if not self.uses_kernels:
            if inv_freq is not None:
                raise ValueError("only a GPU's append rotates keys; rotate them first")
            reference.append(self.fmt, tensors, self.table_SN, k_BQGD, v_BQGD, plan.rows, plan.view)
            return
        rows, paged = plan.device_rows, self.paged
        _kernels().run_append(
            self.fmt, tensors, self.table_SN, k_BQGD, v_BQGD, rows, paged=paged, inv_freq=inv_freq
        )

    def _rope_append(
        self,
        plan: StepPlan,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        inv_freq: Tensor,
    ) -> Tensor:
        if not self.rotates(q_BQHD.shape[1], fresh=plan.fresh):
            raise ValueError("this step's append does not rotate; rotate queries and keys first")
        rotated: Tensor = _kernels().run_append(
            self.fmt,
            self.layers[layer],
            self.table_SN,
            k_BQGD,
            v_BQGD,
            plan.device_rows,
            paged=self.paged,
            q=q_BQHD,
            inv_freq=inv_freq,
        )
        return rotated

    def _gather(
        self,
        plan: StepPlan,
        layer: int,
        q_BQHD: Tensor,
        scale: float,
        alibi_slopes_H: Tensor | None,
        rule: reference.ScoreRule,
    ) -> Tensor:
        given = (self.fmt, self.layers[layer], self.table_SN, q_BQHD, plan.device_rows)
        plain, own = rule.is_plain and alibi_slopes_H is None, _latent_codes()
        if plain and own.takes(self.fmt, self.layers[layer], q_BQHD):
            return own.attend_latent_codes(*given, max_end=plan.max_end, scale=scale)
        return _attend_any_size().attend_any_size(
            *given,
            max_end=plan.max_end,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            rule=rule,
        )

    def _decode(
        self,
        plan: StepPlan,
        layer: int,
        q_BQHD: Tensor,
        scale: float,
        alibi_slopes_H: Tensor | None,
        rule: reference.ScoreRule,
    ) -> Tensor:
        batch, q_len, heads, _ = q_BQHD.shape
        attend = plan_attend(
            batch=batch,
            q_len=q_len,
            heads=heads,
            kv_heads=self.kv_heads,
            max_end=plan.max_end,
            device=self.device,
            bits=self.fmt.bits,
            head_dim=self.fmt.head_dim,
            key_group=self.fmt.key_group,
        )
        return _kernels().run_attend(
            self.fmt,
            self.layers[layer],
            self.table_SN,
            q_BQHD,
            plan.device_rows,
            attend,
            scale=scale,
            paged=self.paged,
            slopes=alibi_slopes_H,
            tickets=self.tickets,
            rule=rule,
        )


def _kernels() -> ModuleType:
    """Import what needs Triton, only where a GPU runs it."""
    return importlib.import_module("llmpq.kernels.kv.ops")


def _append_any_size() -> ModuleType:
    return importlib.import_module("llmpq.kernels.kv.low_bit.any_size_append")


def _attend_any_size() -> ModuleType:
    return importlib.import_module("llmpq.kernels.kv.low_bit.any_size_attend")


def _latent_codes() -> ModuleType:
    return importlib.import_module("llmpq.kernels.kv.low_bit.latent_codes")


def prompt_attention(
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of prompts over their own 16-bit tokens, padded on the right."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHD, k_BQGD, v_BQGD))
    gqa = q.shape[1] != k.shape[1]
    if alibi_slopes_H is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    pos = torch.arange(q.shape[2], device=q.device)
    distance = (pos[None, :] - pos[:, None]).to(q.dtype)
    bias = alibi_slopes_H.to(q.dtype)[:, None, None] * distance
    bias = bias.masked_fill(distance > 0, float("-inf"))[None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)
