"""Few rows of x times a weight of 16 bits on Hopper: by `ring_gemv.cu`, where the table has it.

cuBLAS's products start when the kernel before has ended, and read nothing until then.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.cuda import ring_launch
from llmpq.kernels.gemm.ranking.config import ProductPlan, make_plan
from llmpq.kernels.gemm.ranking.ring_plan import ring_config
from llmpq.kernels.kernel_table import Kernel, KernelForm, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors
from llmpq.kernels.nvrtc import available

MOST_BYTES = 512 << 20
"""Of a weight: cuBLAS reads larger ones at the memory's rate (H200, 128256 x 4096)."""


def few_rows(
    x: Tensor, w_NK: Tensor, residual: Tensor | None, *, into_residual: bool = False
) -> Tensor | None:
    """Return x w^T + residual, None where another kernel has to.

    `into_residual`: y may take the residual's place.
    """
    x_MK = x.reshape(-1, w_NK.shape[1])
    plan = _plan(len(x_MK), *w_NK.shape, w_NK.device, w_NK.dtype)
    if plan is None or x.dtype != w_NK.dtype or not w_NK.is_contiguous():
        return None
    x_MK = x_MK.contiguous()
    if not ring_launch.serves(x_MK) or w_NK.data_ptr() % 16:
        return None
    flat = None if residual is None else residual.reshape(-1, len(w_NK))
    if flat is not None and not flat.is_contiguous():
        return None
    in_place = into_residual and flat is not None
    y_MN = flat if in_place and flat is not None else x_MK.new_empty(len(x_MK), len(w_NK))
    ring_launch.dense(plan, x_MK, w_NK, flat, y_MN)
    return y_MN.view(*x.shape[:-1], len(w_NK))


@functools.lru_cache(maxsize=1 << 12)
def _plan(
    rows: int, n: int, k: int, device: torch.device, dtype: torch.dtype
) -> ProductPlan | None:
    if not rows or dtype not in (torch.float16, torch.bfloat16) or n % BLOCK_ROWS:
        return None
    here = device_of(device)
    if Kernel.RING_GEMV not in eligible(KernelForm.DENSE, here, rows) or not available():
        return None
    if n // BLOCK_ROWS < multiprocessors(device):
        return None  # a router's: its few rows of w would be few programs'
    config = ring_config(16, k, rows, zeros=False) if 2 * n * k <= MOST_BYTES else None
    return None if config is None else make_plan(config, here[1:])
