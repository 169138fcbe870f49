"""What a stage needs beside weights and cache on a GPU, against sums done by hand."""

import dataclasses

import pytest

from llmpq.families.common.spec_values import Indexer
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.gpu_workspace import (
    LIBRARY_BYTES,
    PIECE_BYTES,
    SHARES_BYTES,
    gpu_workspace_bytes,
)
from llmpq.sizes.stage_shape import StageShape
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

LLAMA = ModelSpec.by_name("llama-3.1-8b")
H, Q, F, V = 4096, 4096, 14336, 128256
PLAIN = Precision.parse("16")
PACKED = Precision.parse("4")


def beside(
    precision: Precision = PLAIN,
    *,
    first: bool = True,
    last: bool = True,
    spec: ModelSpec = LLAMA,
    **job: int,
) -> int:
    work = Workload(
        batch=32,
        prompt_len=job.get("prompt", 512),
        gen_len=job.get("longest", job.get("prompt", 512) + 100) - job.get("prompt", 512),
        kv=KVPrecision.KV16,
        dtype="bfloat16",
    )
    found = gpu_workspace_bytes(
        spec,
        work,
        StageShape(
            precisions=[precision],
            first=first,
            last=last,
            prefill_microbatch=job.get("prefill", 32),
            decode_microbatch=job.get("decode", 32),
        ),
    )
    return found - LIBRARY_BYTES


def test_the_widest_moment_of_a_prompt_is_the_gate() -> None:
    """x, attention's result, y, its norm, gate and up, and their product; token ids; logits."""
    tokens = 32 * 512
    assert beside() == 2 * tokens * (4 * H + 3 * F) + 8 * tokens + 2 * 32 * V


def test_an_indexer_holds_queries_scores_and_its_choice_of_some_tokens() -> None:
    """Where requests are longer than its choice; 128 tokens at a time."""
    v3 = ModelSpec.by_name("deepseek-v3")
    form = Indexer(heads=64, dim=128, topk=2048)
    spec = dataclasses.replace(v3, indexer=form, head_dim=v3.head_dim + form.dim, ffn=64, experts=0)
    tokens, longest = 512, 131072
    found = beside(spec=spec, prompt=tokens, prefill=1, decode=1, longest=longest)
    entry, sums = 576 + 128, 128 * 512
    whole = 2 * tokens * (2 * spec.hidden + entry + 128 * 576 + 2 * 64 * 128 + sums)
    scores = 128 * (4 * longest + 12 * 2048)
    assert found == whole + scores + 4 * 128 * sums + 8 * tokens + 2 * spec.vocab
    short = beside(spec=spec, prompt=tokens, prefill=1, decode=1)
    assert short < found - scores, "no request has more keys than it chooses"


def test_a_recurrence_is_not_the_widest_moment_of_a_hybrid() -> None:
    """Its kernels keep no float32 beside what they read: x, attention's result, y, norm, gate."""
    spec = ModelSpec.by_name("qwen3.5-27b")
    tokens, q = 8192, 24 * 256
    wide = 2 * tokens * (3 * spec.hidden + q + 3 * spec.ffn)
    found = beside(spec=spec, prompt=tokens, prefill=1, decode=1)
    assert found == wide + 8 * tokens + 2 * spec.vocab


def test_a_packed_weight_is_a_dense_matrix_beside_many_rows_only() -> None:
    few, many = {"prompt": 64, "prefill": 4}, {"prompt": 64, "prefill": 5}
    assert beside(PACKED, **few) == beside(PLAIN, **few)
    tokens = 320
    gate = 2 * tokens * (4 * H + 2 * F) + 2 * 2 * F * H
    assert beside(PACKED, **many) == gate + 8 * tokens + 2 * 32 * V


def test_hopper_does_not_unpack() -> None:
    work = Workload(batch=32, prompt_len=64, gen_len=100, dtype="bfloat16")
    sizes = {"first": True, "last": True, "prefill_microbatch": 5, "decode_microbatch": 5}
    found = [
        gpu_workspace_bytes(LLAMA, work, StageShape(precisions=[PACKED], unpacks=unpacks, **sizes))
        for unpacks in (True, False)
    ]
    assert found[0] - found[1] == 2 * 2 * F * H - SHARES_BYTES


def test_hopper_makes_8_bit_weights_dense_in_pieces_beside_many_tokens() -> None:
    def found(precision: Precision, rows: int, *, unpacks: bool) -> int:
        work = Workload(batch=32, prompt_len=64, gen_len=100, dtype="bfloat16")
        sizes = {"first": True, "last": True, "prefill_microbatch": rows, "decode_microbatch": 1}
        stage = StageShape(precisions=[precision], unpacks=unpacks, **sizes)
        return gpu_workspace_bytes(LLAMA, work, stage)

    eight = Precision.W8A16
    assert found(eight, 8, unpacks=False) == found(PACKED, 8, unpacks=False)
    assert found(eight, 9, unpacks=False) - found(PACKED, 9, unpacks=False) == (
        PIECE_BYTES - SHARES_BYTES
    )
    assert found(eight, 9, unpacks=True) - found(eight, 9, unpacks=False) == (
        2 * 2 * F * H - PIECE_BYTES
    )


def test_packed_weights_alone_need_no_library() -> None:
    work = Workload(batch=8, prompt_len=64, gen_len=16, dtype="bfloat16")
    sizes = {"first": True, "prefill_microbatch": 2, "decode_microbatch": 2, "unpacks": False}

    def found(*precisions: Precision, last: bool = False) -> int:
        return gpu_workspace_bytes(
            LLAMA, work, StageShape(precisions=precisions, last=last, **sizes)
        )

    assert found(PACKED, PLAIN) - found(PACKED) == LIBRARY_BYTES
    assert found(PACKED, PLAIN, last=True) == found(PACKED, last=True)
    sizes["prefill_microbatch"] = 8
    assert found(PACKED, Precision.W8A16) == found(Precision.W8A16), "512 tokens: our own alone"
    sizes["prefill_microbatch"] = 9
    assert found(PACKED, Precision.W8A16) == found(Precision.W8A16, PLAIN), "pieces meet cuBLAS"


def test_a_stage_between_others_has_an_inbox_and_outputs_on_their_way() -> None:
    message = 2 * 32 * 512 * H
    step = 2 * 32 * H
    gate = 2 * 32 * 512 * (4 * H + 3 * F)
    assert beside(first=False, last=False) == gate + 4 * message + 2 * step
    assert beside(first=False, last=True) == gate + 2 * message + step + 2 * 32 * V


def test_steps_are_padded_and_messages_are_not() -> None:
    """1,600 tokens of 8 prompts take 1,792 in the layers, 1,600 in an inbox; 400 take 448."""
    padded, message = 2 * 1792 * (4 * H + 3 * F), 2 * 8 * 200 * H
    sizes = {"prompt": 200, "prefill": 8, "decode": 8}
    step = 2 * 8 * H
    assert beside(first=False, last=False, **sizes) == padded + 4 * message + 2 * step
    few = {"prompt": 50, "prefill": 8, "decode": 8}
    assert beside(**few) == 2 * 448 * (4 * H + 3 * F) + 8 * 448 + 2 * 8 * V


def test_experts_hold_what_was_sent_to_them() -> None:
    work = Workload(batch=4, prompt_len=256, gen_len=16, dtype="bfloat16")
    sizes = {"first": True, "last": True, "prefill_microbatch": 4, "decode_microbatch": 4}
    spec = ModelSpec.by_name("mixtral-8x7b")
    dense = dataclasses.replace(spec, experts=0, experts_per_token=0)
    stage = StageShape(precisions=[PLAIN], **sizes)
    found, one = (gpu_workspace_bytes(s, work, stage) for s in (spec, dense))
    tokens, f, h = 4 * 256, spec.ffn, spec.hidden
    routed = tokens * (4 * 8 + 2 * 36)
    # Beside the stream: two experts' hidden features of every token, gate and up and their product.
    mixture = tokens * 2 * (5 * h + spec.heads * spec.head_dim + 2 * 3 * f) + routed
    plain = tokens * 2 * (3 * h + spec.heads * spec.head_dim + 3 * f)
    assert found - one == mixture - plain
