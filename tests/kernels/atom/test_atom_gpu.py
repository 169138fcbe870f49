"""W4A4 and W8A8 on a GPU: products, fused roundings and a whole layer against their CPU twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.atom import portable
from llmpq.kernels.atom.hopper import HopperPlan, norm_input, product
from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.fused.gated_mlp import gate_mul
from llmpq.kernels.fused.layer_norm import layer_norm
from llmpq.kernels.fused.rms_norm import rms_norm
from llmpq.kernels.weights.atom_weight import (
    AtomTiles,
    AtomWeight,
    atom_tiles,
    quantize_atom,
)
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.models.wiring import Wiring
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import RandomSource
from reference import check_atom
from reference.atom_twins import integer_product
from reference.contiguous_kv import make_kv_cache
from reference.gemm_twins import relative_error
from reference.kernel_commands import main as kernels_main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_the_check_command_finds_nothing_wrong_and_every_planted_fault() -> None:
    words = ["--shapes", "odd", "--m", "1,33,65,130,300"]
    assert kernels_main(["check", "atom", *words]) == 0


def test_products_replay_in_graphs() -> None:
    torch.manual_seed(0)
    weight = quantize_atom(
        torch.randn(256, 512, device="cuda"), check_atom.W4A4, dtype=torch.bfloat16
    )
    tiles = weight.packed()
    for m in (4, 200):
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        tiles.matmul(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tiles.matmul(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert relative_error(y, atom_linear_reference(x.float(), weight)) < 4e-3


@pytest.mark.parametrize(("bm", "warpgroups"), [(96, 3), (160, 2)])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 1296, 1100), (90, 256, 14336), (333, 6144, 512), (65, 256, 4096)]
)
def test_tiles_whose_k_is_shared_out(bm: int, warpgroups: int, m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    scheme = replace(check_atom.W4A4, outliers=128)
    weight = quantize_atom(torch.randn(n, k, device="cuda"), scheme, dtype=torch.bfloat16)
    tiles = atom_tiles(weight)
    x, more = (torch.randn(m, w, device="cuda", dtype=torch.bfloat16) for w in (k, n))
    exact = integer_product(x, weight).float() + more.float()
    tokens = norm_input(x, tiles)
    runs = [
        product(
            tokens,
            tiles,
            dtype=x.dtype,
            residual_MN=more,
            chosen=HopperPlan(bm=bm, warpgroups=warpgroups, shares=shares),
        ).float()
        for shares in (True, True, False)
    ]
    assert torch.equal(runs[0], runs[1]), "who arrives last must not matter, nor what it leaves"
    assert relative_error(runs[0], exact) < 4e-3 and relative_error(runs[2], exact) < 4e-3
    assert relative_error(runs[0].roll(1, dims=1), exact) > 0.5


@pytest.mark.parametrize("outliers", [0, 128])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 1296, 1100), (257, 48, 14336), (1024, 6144, 512), (2050, 256, 4096)]
)
def test_products_of_integer_scales(outliers: int, m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    scheme = replace(check_atom.INTEGERS, outliers=outliers)
    weight = quantize_atom(torch.randn(n, k, device="cuda"), scheme, dtype=torch.bfloat16)
    tiles = atom_tiles(weight)
    x, more = (torch.randn(m, w, device="cuda", dtype=torch.bfloat16) for w in (k, n))
    x[:, : k // 2] *= torch.rand(k // 2, device="cuda") * 4  # groups of many scales
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    tokens = norm_input(x, tiles)
    assert tokens.unit is not None
    exact = integer_product(x, weight).float()
    scale = exact.abs().mean()
    y = product(tokens, tiles, dtype=x.dtype)
    assert relative_error(y, exact) < 4e-3
    assert torch.equal(y, product(tokens, tiles, dtype=x.dtype))
    more *= scale
    wanted = exact + more.float() + (bias * scale).float()
    into = product(
        tokens, tiles, dtype=x.dtype, bias=bias * scale, residual_MN=more, into_residual=True
    )
    assert into.data_ptr() == more.data_ptr()
    assert relative_error(into, wanted) < 5e-3  # two roundings to bfloat16
    free = replace(scheme, integer_scales=False)
    apart = atom_linear_reference(x.float(), replace(weight, scheme=free))
    assert relative_error(y, apart) > 8e-3  # groups' own scales are another product
    assert norm_input(x[:256], tiles).unit is None


def test_a_compiled_product_of_integer_scales_is_its_twin() -> None:
    torch.manual_seed(0)
    weight = quantize_atom(
        torch.randn(256, 1024, device="cuda"), check_atom.INTEGERS, dtype=torch.bfloat16
    )
    tiles = weight.packed()
    assert isinstance(tiles, AtomTiles) and tiles.steps is not None
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    scheme = tiles.scheme
    y = torch.ops.llmpq.rounded_linear(
        *(x, tiles.codes, tiles.scale, None, None, 256, scheme.outliers, scheme.activation_bits),
        *(scheme.activation_clip, scheme.signed_scale, scheme.rotation, tiles.steps, tiles.unit),
    )
    assert torch.equal(y, tiles.matmul(x))
    assert relative_error(y, atom_linear_reference(x.float(), weight)) < 4e-3


@pytest.mark.parametrize("making", ["rms", "layer", "silu"])
@pytest.mark.parametrize(
    ("scheme", "k", "dtype"),
    [
        (W8A8, 14336, torch.bfloat16),
        (W8A8, 264, torch.float16),
        (replace(check_atom.W4A4, group_size=64), 4096, torch.bfloat16),
    ],
)
def test_inputs_rounded_as_they_are_made_are_those_of_two_passes(
    scheme: AtomScheme, k: int, dtype: torch.dtype, making: str
) -> None:
    """Bit for bit, by W8A8's kernels and those of W4A4 that any GPU runs."""
    torch.manual_seed(0)
    order = torch.randperm(k, device="cuda") if scheme.outliers and making != "silu" else None
    weight = quantize_atom(torch.randn(16, k, device="cuda"), scheme, dtype=dtype, index_K=order)
    weight_K = 1 + torch.randn(k, device="cuda", dtype=dtype) * 0.1
    bias_K = weight_K - 1
    for m in (1, 333):
        x = torch.randn(m, 2 * k if making == "silu" else k, device="cuda", dtype=dtype) * 3
        if making == "rms":
            got = portable.norm_input(x, weight, norm="rms", weight_K=weight_K, eps=1e-5)
            made = rms_norm(x, weight_K, 1e-5)
        elif making == "layer":
            given = {"weight_K": weight_K, "bias_K": bias_K, "eps": 1e-5}
            got = portable.norm_input(x, weight, norm="layer", **given)  # type: ignore[arg-type]
            made = layer_norm(x, weight_K, bias_K, 1e-5)
        else:
            got, made = portable.activation_input(x, weight, "silu"), gate_mul(x)
        want = portable.any_input(made, weight)
        used = slice(None) if scheme.outliers else slice(0, -1)
        off = int((got.codes != want.codes).sum()), int((got.scales != want.scales)[:, used].sum())
        assert off == (0, 0), f"{making}, {m} rows: codes and scales that differ"


@pytest.mark.parametrize("scheme", [W8A8, replace(check_atom.W4A4, group_size=64, outliers=64)])
@pytest.mark.parametrize(("rows", "q_len"), [(1, 3), (40, 5)])
def test_a_layer_that_rounds_as_it_makes_is_one_of_separate_passes(
    scheme: AtomScheme, rows: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, residual streams included; a fault in a weight shows."""
    torch.manual_seed(0)
    spec, parts = _layer(scheme)
    x = torch.randn(rows, q_len, spec.hidden).to(torch.bfloat16)
    cuda = torch.device("cuda")
    fused = _run(spec, parts, x, cuda, packed=False)
    monkeypatch.setattr(AtomWeight, "takes_rounded_tokens", False)
    apart = _run(spec, parts, x, cuda, packed=False)
    assert torch.equal(fused, apart)
    down = parts["down.weight"]
    assert isinstance(down, AtomWeight)
    fault = parts | {"down.weight": replace(down, scale=down.scale.roll(1, dims=0))}
    assert not torch.equal(fused, _run(spec, fault, x, cuda, packed=False))


@pytest.mark.parametrize("activation_bits", [4, 16])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("q_len", [3, 5])
def test_a_layer_is_its_twin(rows: int, q_len: int, activation_bits: int) -> None:
    """As near to the layer in float32 as the CPU's layer in bfloat16, by few and many tokens' ways.

    Rounding sums to bfloat16 between operations moves some 4-bit codes by one, an eighth of a
    group's largest value each: on the CPU alone that is an error of 0.093, and 0.015 where
    activations keep 16 bits.
    """
    spec, parts = _layer(replace(check_atom.W4A4, activation_bits=activation_bits))
    x = torch.randn(rows, q_len, spec.hidden).to(torch.bfloat16)
    exact = _change(spec, parts, x, torch.device("cpu"), torch.float32)
    on_cpu = _change(spec, parts, x, torch.device("cpu"), torch.bfloat16)
    rounded = relative_error(on_cpu, exact)
    cuda = torch.device("cuda")
    assert relative_error(_change(spec, parts, x, cuda, torch.bfloat16), exact) < 1.25 * rounded
    last = _run(spec, parts, x, cuda, last_only=True)
    assert last.shape[1] == 1
    change = last.cpu().float() - x[:, -1:].float()
    limit = 1.5 * relative_error(on_cpu[:, -1:], exact[:, -1:])
    assert relative_error(change, exact[:, -1:]) < limit
    o = parts["o.weight"]
    assert isinstance(o, AtomWeight)
    for fault in (replace(o, index_K=None), replace(o, scale=o.scale.roll(1, dims=1))):
        broken = _change(spec, parts | {"o.weight": fault}, x, cuda, torch.bfloat16)
        assert relative_error(broken, exact) > 3 * rounded


def test_a_layer_of_integer_scales_is_its_twin() -> None:
    """300 tokens; their scales, and so the errors allowed, as above."""
    torch.manual_seed(0)
    spec, parts = _layer(check_atom.INTEGERS)
    x = torch.randn(60, 5, spec.hidden).to(torch.bfloat16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    exact = _change(spec, parts, x, cpu, torch.float32)
    rounded = relative_error(_change(spec, parts, x, cpu, torch.bfloat16), exact)
    assert relative_error(_change(spec, parts, x, cuda, torch.bfloat16), exact) < 1.25 * rounded
    down = parts["down.weight"]
    assert isinstance(down, AtomWeight)
    fault = parts | {"down.weight": replace(down, scale=down.scale.roll(1, dims=1))}
    assert relative_error(_change(spec, fault, x, cuda, torch.bfloat16), exact) > 3 * rounded


def _layer(scheme: AtomScheme) -> tuple[ModelSpec, dict[str, Weight]]:
    """A small layer, W4A4 with 64 outliers, channel orders and a rotation before `down`."""
    spec = replace(ModelSpec.by_name("llama-3.1-8b"), num_layers=1, hidden=512, ffn=1024, heads=4)
    spec = replace(spec, kv_heads=2, vocab=64)
    dense = RandomSource(spec).layer(0, torch.float32)
    parts: dict[str, Weight] = dict(dense)
    for name in ("qkv", "o", "gate_up", "down"):
        order = None if name == "down" else torch.randperm(dense[f"{name}.weight"].shape[1])
        parts[f"{name}.weight"] = quantize_atom(
            dense[f"{name}.weight"],
            scheme
            if scheme.group_size is None
            else replace(scheme, outliers=64, rotation=name == "down"),
            dtype=torch.bfloat16,
            index_K=order if scheme.outliers else None,
        )
    return spec, parts


def _change(
    spec: ModelSpec,
    parts: dict[str, Weight],
    x: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a layer adds to x."""
    return _run(spec, parts, x.to(dtype), device).cpu().float() - x.float()


def _run(
    spec: ModelSpec,
    parts: dict[str, Weight],
    x: torch.Tensor,
    device: torch.device,
    *,
    last_only: bool = False,
    packed: bool = True,
) -> torch.Tensor:
    """`packed`: weights are to be in Hopper's form."""
    made = LayerTensors(
        tensors=parts, scheme=None, dtype=x.dtype, device=device, norm_eps=spec.norm_eps
    )
    layer = Wiring(spec, device, backend_of(device).layers()).layer(made, 0)
    hopper = packed and device.type == "cuda"
    assert isinstance(layer.attention.qkv.weight, AtomTiles) == hopper
    rows, q_len, _ = x.shape
    kv = make_kv_cache(
        spec,
        KVPrecision.KV16,
        num_layers=1,
        slots=rows,
        max_len=16,
        dtype=x.dtype,
        device=device,
    )
    step = Step.of(range(rows), [0] * rows, [q_len] * rows, device=device)
    with torch.inference_mode():
        return layer(x.to(device), 0, step, kv, last_only=last_only)
