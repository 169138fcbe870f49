"""The experts of one layer as one product: weights stacked, pairs assigned on the device.

    stack = ExpertStack(E)                 weights are put in as they are read, come back as views
    dispatch = assign(expert_TK, E)            who goes where (expert_dispatch.py)
    up = stack.product(x_TK, dispatch)         [C, N] sorted by expert, x gathered
    hidden = stack.product(x, dispatch, gate=gate)     [C, N / 2] gated, if stack.gates(...)
    y = stack.product(hidden_CK, dispatch, back=True)     [C, N], every pair at its own number

`experts_reference` of tests/reference/gemm_twins.py is the twin.

Legend: T tokens, k experts of a token, C = T k pairs, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.experts import expert_rows_launch, expert_wide, gluon_expert_launch
from llmpq.kernels.gemm.experts.e4m3_experts import fp8_product
from llmpq.kernels.gemm.experts.expert_blocks import WIDE
from llmpq.kernels.gemm.experts.expert_dispatch import ExpertDispatch
from llmpq.kernels.gemm.experts.expert_kernel import dense_expert_kernel, packed_expert_kernel
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gemm.experts.stack_words import StackWords
from llmpq.kernels.gemm.ranking.config import Config, make_plan
from llmpq.kernels.gemm.ranking.machine import machine_of
from llmpq.kernels.kernel_table import Kernel, KernelForm, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors
from llmpq.kernels.overlap import overlaps

if TYPE_CHECKING:
    from llmpq.kernels.weights.fp8_weight import Fp8Weight
    from llmpq.kernels.weights.weight import Weight

ROW_BLOCKS = 4
"""Blocks of pairs of an even routing that one program takes, its weight in the L2 meanwhile."""


class ExpertStack:
    """One linear of all experts [E, N, K], packed or dense, with or without biases."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._tensors: dict[str, Tensor] = {}
        """All experts' [E, ...], by the name of a weight's field."""
        self._bias: Tensor | None = None
        self.first: Weight | None = None
        """Expert 0's weight as it was given back: who holds another one is not of this stack."""

    def takes(self, weight: Weight, bias: Tensor | None) -> bool:
        """Whether a weight can be the next of this stack: as wide and as packed as those before."""
        key = weight.expert_key
        if key is None or self.first is None:
            return key is not None
        return (bias is None) == (self._bias is None) and key == self.first.expert_key

    def put(self, index: int, weight: Weight, bias: Tensor | None) -> tuple[Weight, Tensor | None]:
        """Copy expert `index` in; return it as a view of the stack."""
        weight = weight.as_expert()
        if not self._tensors:
            self._tensors = {n: self._room(tensor) for n, tensor in weight.tensors.items()}
        views = {n: self._tensors[n][index].copy_(tensor) for n, tensor in weight.tensors.items()}
        made = weight.with_tensors(views)
        if index == 0:
            self.first = made
        if bias is not None:
            self._bias = self._room(bias) if self._bias is None else self._bias
            bias = self._bias[index].copy_(bias)
        return made, bias

    def _room(self, given: Tensor) -> Tensor:
        return given.new_empty(self._experts, *given.shape)

    @property
    def _kind(self) -> str:
        """What the kernels call the weights: "dense", "packed", "mxfp4" or "fp8"."""
        key = None if self.first is None else self.first.expert_key
        assert key is not None, "a stack without experts"
        return str(key[0])

    @property
    def _words(self) -> StackWords:
        like: Any = self.first
        return StackWords(like, self._tensors)

    def gates(self, x: Tensor, dispatch: ExpertDispatch) -> bool:
        """Whether the product can be gated as it is made: w's first half the gate's rows."""
        kernel = self._kernel(x, dispatch)
        few = rows_of(dispatch.order_C.numel(), self._experts)[0] <= MOST_GATED
        deep = kernel is Kernel.EXPERTS_WGMMA or few
        return kernel is Kernel.EXPERTS_WIDE or (deep and self._halves())

    def _halves(self) -> bool:
        """Whether gate and up each are whole blocks of rows; float32 has no tiles for both."""
        assert self.first is not None
        if self._kind == "dense":
            return self._tensors["values"].element_size() == 2
        by_rows = self._kind == "fp8" and not self._fp8.fragment
        return by_rows or self.first.out_features % (2 * BLOCK_ROWS) == 0

    @property
    def _fp8(self) -> Fp8Weight:
        like: Any = self.first
        made: Fp8Weight = like
        return made

    def _kernel(self, x: Tensor, dispatch: ExpertDispatch) -> Kernel:
        """Return the first kernel of the table whose conditions hold here."""
        for kernel in self._eligible(x.device, dispatch.order_C.numel()):
            if kernel is Kernel.EXPERTS_WGMMA and not gluon_expert_launch.fits(x, dispatch):
                continue
            if kernel is Kernel.EXPERTS_WIDE and not self._is_wide(x, dispatch):
                continue
            if kernel is not Kernel.EXPERTS_GEMV:  # `_launch_packed` asks, gated or not
                return kernel
        raise ValueError(f"no kernel multiplies {self._form.value} on {x.device}")

    def _eligible(self, device: torch.device, pairs: int) -> tuple[Kernel, ...]:
        return eligible(self._form, device_of(device), -(-pairs // self._experts))

    @property
    def _form(self) -> KernelForm:
        assert self.first is not None
        if self._kind == "dense":
            return KernelForm.EXPERTS_DENSE if self.first.bits == 16 else KernelForm.EXPERTS_FLOAT32
        if self._kind != "packed":
            return KernelForm.EXPERTS_MXFP4 if self._kind == "mxfp4" else KernelForm.EXPERTS_FP8
        if self.first.bits == 8:
            return KernelForm.EXPERTS_8
        in_groups = self._words.like.group_size is not None
        return KernelForm.EXPERTS_4 if self.first.bits == 4 and in_groups else KernelForm.EXPERTS_3

    def _is_wide(self, x: Tensor, dispatch: ExpertDispatch) -> bool:
        """Whether expert_wide.py's tiles fit."""
        if x.element_size() != 2 or dispatch.blocks is None:
            return False
        return bool(knobs.runtime.interpret) or wide_fits(machine_of(x.device).shared_block)

    def product(
        self,
        x: Tensor,
        dispatch: ExpertDispatch,
        *,
        back: bool = False,
        gate: GateRule | None = None,
    ) -> Tensor:
        """Return every pair's row times its expert's weight.

        x [T, K] and y [C, N] sorted by expert, or with `back` x [C, K] so sorted and y in the
        order of the pairs' indices; with `gate`, where `gates`, y [C, N / 2].
        """
        kernel = self._kernel(x, dispatch)
        if kernel is Kernel.EXPERTS_WGMMA:
            stack = self._tensors["values"] if self._kind == "dense" else self._words
            return gluon_expert_launch.product(stack, self._bias, x, dispatch, back=back, gate=gate)
        if kernel is Kernel.EXPERTS_WIDE:
            return self._launch_wide(x.contiguous(), dispatch, back, gate)
        assert gate is None or self.gates(x, dispatch)
        if self._kind == "fp8":
            tensors = (self._tensors["codes_NK"], self._tensors["scale"], self._bias)
            pairs = rows_of(dispatch.order_C.numel(), self._experts)
            x = x.contiguous()
            return fp8_product(self._fp8, tensors, x, dispatch, pairs, back=back, gate=gate)
        launch = self._launch_dense if self._kind == "dense" else self._launch_packed
        return launch(x.contiguous(), dispatch, back, gate)

    def _launch_wide(
        self, x: Tensor, dispatch: ExpertDispatch, back: bool, gate: GateRule | None
    ) -> Tensor:
        w, tile = self._tensors["values"], expert_wide
        assert dispatch.blocks is not None
        experts, n, k = w.shape
        leave, own = (n, tile.BN) if gate is None else (n // 2, tile.BN // 2)
        y, tiles = x.new_empty(dispatch.order_C.numel(), leave), triton.cdiv(leave, own)
        interpret, pdl = bool(knobs.runtime.interpret), overlaps(x.device)
        tma = not interpret and tensor_memory(x.device, k)
        box = TensorDescriptor(w, [experts * n, k], [k, 1], [own, tile.BK]) if tma else w
        rule = gate or GateRule()
        expert_wide.wide_expert_kernel[(dispatch.blocks.shape[0] * tiles,)](
            x,
            w,
            box,
            x if self._bias is None else self._bias,
            y,
            dispatch.order_C,
            dispatch.blocks,
            dispatch.count,
            n,
            k,
            dispatch.per_token,
            tiles,
            float(rule.limit),
            float(rule.slope),
            BM=WIDE,
            BN=tile.BN,
            BK=tile.BK,
            TAIL=tile.TAIL,
            STAGES=tile.STAGES,
            GATHER=not back,
            FUSE=gate is not None,
            ACT=rule.activation,
            HAS_BIAS=self._bias is not None,
            TMA=tma,
            EVEN_K=k % tile.BK == 0,
            EVEN_N=leave % own == 0,
            PDL=pdl,
            INTERPRET=interpret,
            num_warps=tile.WARPS,
            launch_pdl=pdl,
        )
        return y

    def _launch_packed(
        self, x: Tensor, dispatch: ExpertDispatch, back: bool, gate: GateRule | None
    ) -> Tensor:
        stack, pairs = self._words, dispatch.order_C.numel()
        q, table = stack.like, stack.is_e2m1
        bm, shares = rows_of(pairs, self._experts)
        fused = gate is not None
        if fused and q.bits == 4 and pairs <= FEW * self._experts:
            bm = FEW_ROWS
        interpret = bool(knobs.runtime.interpret)
        capability = (9, 0) if interpret else torch.cuda.get_device_capability(x.device)
        blocks, groups = q.out_features // BLOCK_ROWS, -(-q.in_features // 128)
        high, warps, stages = packed_tiles(bm, groups, fused=fused)
        tiles = triton.cdiv(blocks, (1 + fused) * high * warps)
        walking = min(pairs, self._experts) * tiles // multiprocessors(x.device)
        if table and x.element_size() != 2 and not interpret:
            raise ValueError(f"MXFP4 experts on a GPU: got x in {x.dtype}, expected 16 bits")
        form = None
        if Kernel.EXPERTS_GEMV in self._eligible(x.device, pairs):
            form = expert_rows_launch.form_of(q, pairs, self._experts, walking, fused=fused)
        if form is not None:
            return expert_rows_launch.product(
                stack, form, self._bias, x, dispatch, back=back, gate=gate
            )
        config = Config(kernel="splitk_gemm", blocks=high, warps=warps, bm=bm, stages=stages)
        plan = make_plan(config, capability, interpret=interpret)
        parts, rule = 1 if gate is None else 2, gate or GateRule()
        y = x.new_empty(pairs, q.out_features // parts)
        packed_expert_kernel[(tiles, dispatch.most_runs, shares)](
            x,
            *stack.words,
            x if self._bias is None else self._bias,
            y,
            dispatch.order_C,
            dispatch.runs_E,
            q.out_features,
            q.in_features,
            blocks,
            groups,
            dispatch.per_token,
            shares,
            float(rule.limit),
            float(rule.slope),
            BITS=q.bits,
            GROUPED=q.group_size is not None,
            SYMMETRIC=q.symmetric,
            EVEN_K=q.in_features % 128 == 0,
            HAS_BIAS=self._bias is not None,
            GATHER=not back,
            BH=high,
            WM=config.warps,
            BM=bm,
            STAGES=config.stages,
            FUSE=gate is not None,
            ACT=rule.activation,
            PDL=plan.pdl,
            KWIDTH4=plan.kwidth4 or bm < WGMMA,
            INTERPRET=interpret,
            E2M1=table,
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=codebook_registers(bm, fused=fused) if table and capability == (9, 0) else None,
            launch_pdl=plan.pdl,
        )
        return y

    def _launch_dense(
        self, x: Tensor, dispatch: ExpertDispatch, back: bool, gate: GateRule | None
    ) -> Tensor:
        w, pairs = self._tensors["values"], dispatch.order_C.numel()
        bm, shares = rows_of(pairs, self._experts)
        rows, stages, warps = dense_tiles(bm, x.element_size(), fused=gate is not None)
        rule, leave = gate or GateRule(), w.shape[1] if gate is None else w.shape[1] // 2
        y, pdl = x.new_empty(pairs, leave), overlaps(x.device)
        dense_expert_kernel[(triton.cdiv(leave, rows), dispatch.most_runs, shares)](
            x,
            w,
            x if self._bias is None else self._bias,
            y,
            dispatch.order_C,
            dispatch.runs_E,
            w.shape[1],
            w.shape[2],
            dispatch.per_token,
            shares,
            float(rule.limit),
            float(rule.slope),
            HAS_BIAS=self._bias is not None,
            GATHER=not back,
            BN=rows,
            BM=bm,
            BK=DENSE_DEPTH,
            STAGES=stages,
            FUSE=gate is not None,
            ACT=rule.activation,
            PDL=pdl,
            INTERPRET=bool(knobs.runtime.interpret),
            num_warps=warps,
            launch_pdl=pdl,
        )
        return y


def wide_fits(shared: int) -> bool:
    """Whether so much shared memory of a program holds expert_wide.py's tiles on their way."""
    tile = expert_wide
    return shared >= tile.STAGES * (WIDE + tile.BN) * tile.BK * 2 + WIDE_BARRIERS


def tensor_memory(device: torch.device, columns: int) -> bool:
    """Whether w's tiles come by TMA: its rows have to begin at multiples of 16 bytes."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and columns % 8 == 0


FEW, FEW_ROWS = 2, 8
"""Pairs of an expert, of an even routing, up to which a gated product of 4 bits takes as many pairs
at a time: by mma.sync, which Triton takes below WGMMA of them, on Hopper, too."""
WGMMA = 16
WIDE_BARRIERS = 1024
MOST_GATED = 64
"""Pairs at a time up to which a program has registers for the sums of gate and up."""
DENSE_DEPTH = 64
"""Columns of w that a dense product takes at a time."""


def packed_tiles(bm: int, groups: int, *, fused: bool = False) -> tuple[int, int, int]:
    """Return blocks of 16 rows of w that a warp takes, warps and stages of a packed product.

    `fused`: of gate rows; as many up rows beside them. `groups` of K: few make short loops, which
    more rows are the better for (benchmarks/families_gpu.py layers, H200).
    """
    if bm > 32:
        return 1, 4, 3
    if fused:
        return (1, 4, 3) if bm <= 16 else (2, 4, 3)
    if bm > 16:
        return 2, 4, 4
    return (2, 4, 3) if groups <= 8 else (1, 4, 4)


def codebook_registers(bm: int, *, fused: bool) -> int | None:
    """Return the registers of a thread of a product of E2M1 on Hopper; None: as many as it takes.

    So many programs to a multiprocessor as of linear codes: 5, 4 and 3 instead of 4, 3 and 2.
    """
    return {(8, True): 128, (16, False): 96, (16, True): 128, (32, False): 168}.get((bm, fused))


def dense_tiles(bm: int, item: int, *, fused: bool = False) -> tuple[int, int, int]:
    """Return rows of w, stages and warps of a dense product: 96 KiB shared at most."""
    if item == 4:
        return 64, 2, 4
    if fused:
        return 64, 5 if bm <= 16 else 4 if bm <= 32 else 3, 4
    return (64, 5, 4) if bm <= 32 else (128, 3, 4)


def rows_of(pairs: int, experts: int) -> tuple[int, int]:
    """Return the pairs a program takes at a time, and the programs that share an expert's."""
    even = -(-pairs // experts)
    # Room for half as many again: the weight of an expert that has more pairs is read again.
    bm = next((size for size in (16, 32, 64) if 3 * even <= 2 * size), 128)
    return bm, max(1, -(-even // (bm * ROW_BLOCKS)))
