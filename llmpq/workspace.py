"""The largest temporary of a stage: activations of one micro-batch in either phase.

The runtime frees as it goes, so the peak is one layer's widest moment (runtime/layers.py), or the
logits of the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.workload import Workload


def workspace_bytes(
    spec: ModelSpec,
    workload: Workload,
    *,
    precisions: Sequence[Precision],
    last: bool,
    prefill_microbatch: int,
    decode_microbatch: int,
) -> int:
    """Return the bytes of the largest temporary over both phases."""
    prefill_tokens = prefill_microbatch * workload.prompt_len
    widest = max(
        _layer_activation_elements(spec, prefill_tokens),
        _layer_activation_elements(spec, decode_microbatch),
    )
    logits = max(prefill_microbatch, decode_microbatch) * spec.vocab * 2 if last else 0
    return max(widest, logits) * workload.dtype_bytes


def _layer_activation_elements(spec: ModelSpec, tokens: int) -> int:
    """Return the elements alive at the widest moment of a layer, the residual stream included."""
    q_out, kv_out = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = 2 * spec.hidden + 2 * (q_out + 2 * kv_out) + q_out
    mlp = 2 * spec.hidden + (3 if spec.gated else 2) * spec.ffn
    return tokens * max(attention, mlp)
