"""Names and dtypes of the tensors of a quantised linear."""

from __future__ import annotations

import torch

DTYPES = {
    **dict.fromkeys(("weight_packed", "weight_zero_point", "qweight", "qzeros"), (torch.int32,)),
    **dict.fromkeys(("weight_shape", "weight_g_idx", "g_idx"), (torch.int32, torch.int64)),
    "codes": (torch.uint8, torch.int8),
    "outliers": (torch.int8,),
    "index_K": (torch.int32,),
}
"""Last part of a tensor's name -> what a checkpoint may store it as; FLOATING for the rest."""
FIELDS = frozenset(DTYPES) | {
    "weight_scale",
    "scales",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_scale_2",
    "input_scale",
    "input_global_scale",
}
"""Last parts of the names of what a quantised linear is stored as."""
