"""The kernels for packed heads of any size compile for every listed architecture; memory fits."""

import pytest
import torch

pytest.importorskip("triton")
from llmpq.kernels.formats.kv_block import KVFormat  # noqa: E402
from llmpq.kernels.kv.low_bit.any_size_append import append_rows, pack_rows  # noqa: E402
from llmpq.kernels.kv.low_bit.any_size_attend import attend_rows, tile_of  # noqa: E402
from llmpq.kernels.kv.ruled_attend import halves  # noqa: E402
from llmpq.precision import KVPrecision  # noqa: E402
from reference.cubin import (  # noqa: E402
    CONSUMER_BLACKWELL,
    SHARED_LIMIT,
    compile_kernel,
)

pytestmark = pytest.mark.compile
KINDS = {
    **dict.fromkeys(("k_words", "v_words", "table", "slots", "starts", "counts"), "*i32"),
    **dict.fromkeys(("k_params", "v_params"), "*fp16"),
    **dict.fromkeys(("slopes", "sinks", "part_ptr", "lse_ptr"), "*fp32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
    **dict.fromkeys(("window", "table_width", "splits", "stride_b", "stride_t", "stride_g"), "i32"),
}
# (precision, query heads, key/value heads, head_dim, dtype): latents, Phi-3, StableLM, Mistral.
MODELS = [
    (KVPrecision.KV4, 16, 1, 576, torch.bfloat16),
    (KVPrecision.KV8, 128, 1, 576, torch.bfloat16),
    (KVPrecision.KV2, 32, 32, 96, torch.float16),
    (KVPrecision.KV4, 32, 8, 80, torch.float32),
    (KVPrecision.KV8, 8, 2, 192, torch.bfloat16),
]


def seldom(*case):
    """In `make test-all` only: its like is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.seldom)


# Each where memory is least but one; of latents those of most rows; `make test-all`: the most
# common one everywhere.
CASES = [*((model, 86) for model in MODELS[1:4]), (MODELS[4], 100)]
CASES += [seldom(MODELS[0], arch) for arch in (80, 86, 89, 90, 100, CONSUMER_BLACKWELL)]
CASES += [seldom(MODELS[4], 86)]
CASES += [seldom(model, 90) for model in MODELS[1:]]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel, arch, constants, element, warps):
    arguments = {
        name: KINDS.get(name, f"*{element}") for name in kernel.arg_names if name not in constants
    }
    aligned = tuple(name for name, kind in arguments.items() if kind.startswith("*"))
    options = {"num_warps": warps}
    made = compile_kernel(kernel, arch, arguments, constants, aligned=aligned, options=options)
    assert made.cubin and made.shared_bytes <= SHARED_LIMIT[arch]
    return made


@pytest.mark.parametrize("model,arch", CASES, ids=lambda value: str(value).replace("torch.", ""))
def test_attention_and_append_fit(model, arch, seeds):
    kv, heads, groups, dim, dtype = model
    fmt = KVFormat(precision=kv, head_dim=dim)
    same = {"G": groups, "D": dim, "C": fmt.channels, "BITS": fmt.bits, "KEY_GROUP": 128}
    rows, keys, warps = tile_of(fmt, dtype.itemsize, heads // groups, SHARED_LIMIT[arch])
    main, rest = halves(dim)
    shape = {"Q": 1, "H": heads, "MAIN": main, "REST": rest, "R": rows, "N": keys}
    padded = max(16, 1 << (dim - 1).bit_length())
    ruled = {"ALIBI": False, "CAPPED": dim == 192, "SINKS": dim == 192, "SPLIT": dim != 96}
    element = NAMES[dtype]
    kernels = [
        (attend_rows, same | shape | ruled | {"PADDED": padded}, warps),
        (append_rows, same | {"Q": 1, "PADDED": padded}, 8),
        (pack_rows, same | {"PIECES": -(-fmt.block_words // 512)}, 4),
    ]
    # In `make test` what appends is compiled once for each number of bits.
    for kernel, constants, num_warps in seeds(kernels) if model in MODELS[3:] else kernels:
        compiled(kernel, arch, constants, element, num_warps)
