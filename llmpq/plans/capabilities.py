"""What runs where: the features of models, and which of our modes to run know each.

One table for every refusal and for `llmpq-algo models`: a mode is a sort of device, packed KV,
speculation, rounded activations. A feature that a run does not meet (rope frequencies
that only longer requests change) does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmpq.devices.device_spec import DeviceSpec
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.kv_format import padded_head_dim
from llmpq.workload import Dtype

ExecutionMode = Literal[
    "gpu",
    "packed_kv",
    "apart_kv",
    "drafts",
    "gpu_packed_kv",
    "gpu_packed_float32",
    "gpu_rounded",
]
EXECUTION_MODES: dict[ExecutionMode, str] = {
    "gpu": "a GPU",
    "packed_kv": "a KV cache of 8, 4 or 2 bits",
    "apart_kv": "keys and values of different bits",
    "drafts": "speculation",
    "gpu_packed_kv": "a KV cache of 8, 4 or 2 bits on a GPU",
    "gpu_packed_float32": "a KV cache of 8, 4 or 2 bits on a GPU",
    "gpu_rounded": "rounded activations (w8a8, w4a4) on a GPU",
}
"""How a sentence names each. Everything runs on a CPU with 16-bit KV at every precision."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that only some models have."""

    name: str
    met: Callable[[ModelSpec, int], bool]
    """Whether a model's requests of so many tokens meet it."""
    without: frozenset[ExecutionMode]
    """The modes that do not know it."""


def _feature(name: str, met: Callable[[ModelSpec, int], bool], *without: ExecutionMode) -> Feature:
    return Feature(name=name, met=met, without=frozenset(without))


def _latents(spec: ModelSpec, max_len: int) -> bool:
    return spec.latent is not None


def _scaled_stream(spec: ModelSpec, max_len: int) -> bool:
    return spec.residual_factor != 1.0


def _unlike_heads(spec: ModelSpec, max_len: int) -> bool:
    return bool(spec.global_head_dim or spec.global_kv_heads or spec.value_is_key)


def _bare_layer_norm(spec: ModelSpec, max_len: int) -> bool:
    return spec.norm == "layernorm" and not spec.norm_bias


def _changing_rope(spec: ModelSpec, max_len: int) -> bool:
    """Whether positions depend on a request's length so far; a run decides longrope once."""
    scaling = spec.rope_scaling
    long = scaling is not None and max_len > scaling.original_max_positions
    return long and scaling is not None and scaling.kind == "dynamic"


def _wide_heads(spec: ModelSpec, max_len: int) -> bool:
    return spec.latent is None and max(spec.head_dim, spec.global_head_dim or 0) > MOST_CHANNELS


def _odd_latents(spec: ModelSpec, max_len: int) -> bool:
    channels = padded_head_dim(spec.head_dim)
    return spec.latent is not None and channels % LATENT_CHANNELS != 0


MOST_CHANNELS = 256
"""Channels of heads at most whose packed blocks a GPU's kernels read."""


LATENT_CHANNELS = 64
"""Of which packed latents on a GPU have a multiple, padded to 32s."""


FEATURES: tuple[Feature, ...] = (
    _feature("latent attention (MLA)", _latents, "gpu_rounded"),
    _feature("recurrent layers", lambda spec, _: spec.recurrent is not None, "gpu_rounded"),
    _feature("layers with unlike heads", _unlike_heads, "gpu_rounded"),
    _feature("normalised values", lambda spec, _: spec.value_norm, "gpu_rounded"),
    _feature("inputs of every layer's own", lambda s, _: s.per_layer_dim > 0, "gpu_rounded"),
    _feature("numbers that layers are scaled by", lambda s, _: s.layer_scalar, "gpu_rounded"),
    _feature("experts beside an MLP", lambda s, _: s.mixture_beside, "gpu_rounded"),
    _feature(
        "sparse attention over chosen tokens",
        lambda spec, _: spec.indexer is not None,
        *("gpu_packed_kv", "gpu_rounded"),
    ),
    _feature("several streams (AltUp)", lambda s, _: s.altup is not None, "gpu_rounded"),
    _feature("sparse gates", lambda s, _: any(s.gate_sparsities), "gpu_rounded"),
    _feature("queries and keys of unit size", lambda s, _: s.qk_unit_norm, "gpu_rounded"),
    _feature(
        "weights on what experts are given", lambda s, _: s.router.weighs_input, "gpu_rounded"
    ),
    _feature("gated attention", lambda spec, _: spec.attention_gate, "gpu_rounded"),
    _feature("a gate for each head of attention", lambda s, _: s.head_gate, "gpu_rounded"),
    _feature("a gate on the shared MLP", lambda spec, _: spec.shared_gate, "gpu_rounded"),
    _feature("rope frequencies that change with the length", _changing_rope, "drafts"),
    _feature("norms behind attention and MLP", lambda s, _: s.norm_order != "pre", "gpu_rounded"),
    _feature("a stream of norms", lambda s, _: s.normed_stream is not None, "gpu_rounded"),
    _feature("a factor on the residual stream", _scaled_stream, "gpu_rounded"),
    _feature("gates of GELU", lambda s, _: s.gated and s.activation == "gelu_tanh", "gpu_rounded"),
    _feature("attention and MLP side by side", lambda s, _: s.parallel_norms > 0, "gpu_rounded"),
    _feature("LayerNorms without biases", _bare_layer_norm, "gpu_rounded"),
    _feature("squared ReLU", lambda s, _: s.activation == "relu2", "gpu_rounded"),
    _feature("exact GELU", lambda s, _: s.activation == "gelu_erf", "gpu_rounded"),
    _feature("xIELU", lambda s, _: s.activation == "xielu", "gpu_rounded"),
    _feature("clamped gates", lambda s, _: s.activation == "clamped_silu", "gpu_rounded"),
    _feature(f"heads of more than {MOST_CHANNELS} channels", _wide_heads, "gpu_packed_kv"),
    _feature(
        f"latents of no multiple of {LATENT_CHANNELS} channels", _odd_latents, "gpu_packed_kv"
    ),
    _feature("latents in float32", _latents, "gpu_packed_float32"),
    _feature("latents that are key and value at once", _latents, "apart_kv"),
)
"""What a mode lacks is refused there, though planned for: its kernels are to come."""


def lacks(spec: ModelSpec, mode: ExecutionMode, *, max_len: int | None = None) -> tuple[str, ...]:
    """Return the features of a model that a mode does not know; by default at its full length."""
    longest = spec.max_positions if max_len is None else max_len
    return tuple(f.name for f in FEATURES if mode in f.without and f.met(spec, longest))


def execution_modes(
    *,
    gpu: bool,
    kv: KVPrecision,
    drafts: bool,
    precisions: Collection[Precision] = (),
    dtype: Dtype = "bfloat16",
) -> tuple[ExecutionMode, ...]:
    """Return which modes a run takes."""
    rounded = any(precision.activation_bits < 16 for precision in precisions)
    packed = kv is not KVPrecision.KV16
    taken: dict[ExecutionMode, bool] = {
        "gpu": gpu,
        "packed_kv": packed,
        "apart_kv": kv.is_apart,
        "drafts": drafts,
        "gpu_packed_kv": gpu and packed,
        "gpu_packed_float32": gpu and packed and dtype == "float32",
        "gpu_rounded": gpu and rounded,
    }
    return tuple(mode for mode, is_taken in taken.items() if is_taken)


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Why something is not run, and what to do about it."""

    why: str
    remedy: str


def lack_of(
    spec: ModelSpec, modes: Collection[ExecutionMode], *, max_len: int | None = None
) -> Lack | None:
    """Return what a run cannot do, None where it can; by default at the model's full length."""
    for mode in modes:
        missing = lacks(spec, mode, max_len=max_len)
        if missing:
            why = (
                f"{spec.name} ({spec.family}) has {' and '.join(missing)}, which llmpq does not "
                f"run with {EXECUTION_MODES[mode]} yet"
            )
            return Lack(why=why, remedy=REMEDY[mode])
    return None


def lacking_sentence(
    spec: ModelSpec, modes: Collection[ExecutionMode], *, max_len: int
) -> str | None:
    """Return what a run cannot do and what to do about it, None where it can."""
    lack = lack_of(spec, modes, max_len=max_len)
    return None if lack is None else f"{lack.why}; {lack.remedy}. See `llmpq-algo models`"


def reads_packed_kv(device: DeviceSpec) -> bool:
    """Whether a device reads a KV cache of fewer than 16 bits."""
    return device.is_cpu or device.drives_tensor_cores


def without_tensor_cores(kinds: Iterable[tuple[str, DeviceSpec]]) -> list[str]:
    """Return the kinds of GPUs whose tensor cores our kernels do not drive, by kind and spec."""
    old = [kind for kind, spec in kinds if not spec.is_cpu and not spec.drives_tensor_cores]
    return list(dict.fromkeys(old))


def packed_kv_sentence(kinds: Iterable[tuple[str, DeviceSpec]]) -> str | None:
    """Return that GPUs read no cache of fewer than 16 bits, and what to do; None where all do."""
    old = without_tensor_cores(kinds)
    return packed_kv_refusal(old) if old else None


def packed_kv_refusal(names: Sequence[str]) -> str:
    """Return that these GPUs read no cache of fewer than 16 bits, and what to do."""
    return (
        f"{PACKED_KV} ({', '.join(names)}): plan with --kv 16, or leave "
        f"{'it' if len(names) == 1 else 'them'} out"
    )


PACKED_KV = "llmpq has no kernels for a KV cache of 8, 4 or 2 bits on GPUs before Ampere"
REMEDY: dict[ExecutionMode, str] = {
    "gpu": "plan for CPU devices, or export the plan to another engine",
    "packed_kv": "plan with --kv 16",
    "apart_kv": "plan with as many bits for both, such as --kv 8",
    "drafts": "run without speculation, or with shorter requests",
    "gpu_packed_kv": "plan with --kv 16",
    "gpu_packed_float32": "plan with --kv 16, or with --dtype bfloat16",
    "gpu_rounded": "plan with weight-only precisions (w8a16, w4a16)",
}


def require(spec: ModelSpec, modes: Collection[ExecutionMode], *, max_len: int) -> None:
    """Raise `ValueError` for a run that needs a feature which one of its modes does not have."""
    sentence = lacking_sentence(spec, modes, max_len=max_len)
    if sentence is not None:
        raise ValueError(sentence)
