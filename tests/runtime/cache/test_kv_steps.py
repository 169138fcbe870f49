"""One forward for prefill, chunks, decode and verification: whatever the steps, the same cache."""

from __future__ import annotations

import pytest
import torch

from llmpq.runtime.steps.step import Step
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
KINDS = ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral")
LENGTHS = (9, 14, 4)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=KINDS)
def pipeline(request, tiny_models):
    return ReferencePipeline.from_directory(tiny_models.directory(request.param))


def whole(pipeline, rows, slots, num_slots=8):
    """Run the rows as fresh prompts; return their logits at every position and the cache."""
    caches = pipeline.caches(num_slots, 32)
    step = Step.of(slots, [0] * len(rows), [len(row) for row in rows])
    return pipeline.logits(pad(rows), step, caches, all_positions=True), caches


def kv_rows(caches, slot, length):
    return [t[slot, :, :length] for cache in caches for t in (*cache.k, *cache.v)]


def assert_same_kv(got, expected, slot, length):
    for a, b in zip(kv_rows(got, slot, length), kv_rows(expected, slot, length), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", [(0, 1, 2), (5, 0, 3)])
def test_chunks_of_unequal_length_equal_one_prefill(pipeline, random_prompts, slots):
    rows = random_prompts(*LENGTHS)
    expected, expected_caches = whole(pipeline, rows, slots)
    caches = pipeline.caches(8, 14)  # the longest row fills the cache: padding must not spill
    done = [0] * len(rows)
    for counts in ((3, 5, 1), (1, 1, 1), (5, 8, 2)):
        chunk = [row[d : d + c] for row, d, c in zip(rows, done, counts, strict=True)]
        logits = pipeline.logits(
            pad(chunk), Step.of(slots, done, counts), caches, all_positions=True
        )
        for row, (start, count) in enumerate(zip(done, counts, strict=True)):
            torch.testing.assert_close(
                logits[row, :count], expected[row, start : start + count], rtol=1e-3, atol=1e-4
            )
        done = [d + c for d, c in zip(done, counts, strict=True)]
    for slot, length in zip(slots, LENGTHS, strict=True):
        assert_same_kv(caches, expected_caches, slot, length)


def test_equal_rows_take_the_uniform_path_to_the_same_result(pipeline, random_prompts):
    rows = random_prompts(8, 8)
    expected, _ = whole(pipeline, rows, (2, 3))
    caches = pipeline.caches(8, 8)
    for start, count in ((0, 3), (3, 1), (4, 4)):
        step = Step.of((2, 3), [start] * 2, [count] * 2)
        assert step.uniform
        tokens = torch.tensor([row[start : start + count] for row in rows])
        logits = pipeline.logits(tokens, step, caches, all_positions=True)
        torch.testing.assert_close(logits, expected[:, start : start + count], rtol=1e-3, atol=1e-4)


def test_rejected_drafts_leave_no_trace(pipeline, random_prompts):
    """Draft 4 tokens, keep 1, go on: bit for bit what plain decoding in the same shapes gives."""
    prompts, drafts, truth = random_prompts(6, 9), random_prompts(4, 4, seed=1), (17, 23)
    lengths = [len(prompt) for prompt in prompts]

    def run(draft: bool) -> torch.Tensor:
        caches = pipeline.caches(2, 20)
        pipeline.logits(pad(prompts), Step.of((0, 1), (0, 0), lengths), caches)
        if draft:
            pipeline.logits(torch.tensor(drafts), Step.of((0, 1), lengths, (4, 4)), caches)
        logits = [
            pipeline.logits(
                torch.tensor(truth)[:, None],
                Step.of((0, 1), [length + i for length in lengths], (1, 1)),
                caches,
            )
            for i in range(3)
        ]
        return torch.stack(logits)

    assert torch.equal(run(draft=True), run(draft=False))


def test_verifying_equals_decoding(pipeline, random_prompts):
    """q_len 4 after a prompt gives the logits and the cache of four steps of q_len 1."""
    prompts, new = random_prompts(6, 9), random_prompts(4, 4, seed=2)
    lengths = [len(prompt) for prompt in prompts]
    logits, all_caches = [], []
    for width in (4, 1):
        caches = pipeline.caches(2, 16)
        pipeline.logits(pad(prompts), Step.of((0, 1), (0, 0), lengths), caches)
        parts = [
            pipeline.logits(
                torch.tensor(new)[:, i : i + width],
                Step.of((0, 1), [length + i for length in lengths], (width, width)),
                caches,
                all_positions=True,
            )
            for i in range(0, 4, width)
        ]
        logits.append(torch.cat(parts, dim=1))
        all_caches.append(caches)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    for slot, length in enumerate(lengths):
        assert_same_kv(*all_caches, slot, length + 4)


def test_a_batch_mate_changes_nothing_but_rounding(pipeline, random_prompts):
    long, short = random_prompts(20, 3)
    together = pipeline.generate([short, long], max_new=8)
    assert together == pipeline.generate([short], max_new=8) + pipeline.generate([long], max_new=8)


def test_learned_positions_have_an_end(tiny_models, random_prompts):
    opt = ReferencePipeline.from_directory(tiny_models.directory("opt"))
    (row,) = random_prompts(129)
    with pytest.raises(ValueError, match="exceeds the 128 learned positions"):
        opt.logits(pad([row]), Step.of((0,), (0,), (129,)), opt.caches(1, 200))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((0,), (0, 1), (1,)), "equally many"),
        (((0,), (0,), (0,)), "a row needs a new token"),
        (((0,), (-1,), (1,)), "start >= 0"),
    ],
)
def test_impossible_steps_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Step.of(*arguments)
