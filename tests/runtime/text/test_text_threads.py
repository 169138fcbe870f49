"""Long texts are read beside the event loop, one at a time, and no more than may wait."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from llmpq import SamplingParams
from llmpq.runtime.requests.sampling_params import StructuredOutputsParams
from llmpq.runtime.text.request_factory import RequestFactory
from llmpq.runtime.text.text_threads import (
    LONG_LENGTH,
    MAX_WAITING,
    QUICK_LENGTH,
    TextThreads,
    TooManyTextsError,
)

pytestmark = pytest.mark.cpu


def thread_name() -> str:
    return threading.current_thread().name.rpartition("_")[0]


@pytest.mark.parametrize(
    ("prompt", "options", "thread"),
    [
        ("def f(x):", {}, ""),
        ("", {}, ""),
        ([1, 2, 3], {"logprobs": 2, "stop": ["\n"], "n": 3}, ""),
        ({"prompt": "a"}, {}, ""),
        (5, {}, ""),
        ("a" * QUICK_LENGTH, {}, ""),
        ("a" * (QUICK_LENGTH + 1), {}, "llmpq text"),
        ([1] * (QUICK_LENGTH + 1), {}, "llmpq text"),
        ({"prompt": "a" * (QUICK_LENGTH + 1)}, {}, "llmpq text"),
        ({"prompt_token_ids": [1] * (LONG_LENGTH + 1)}, {}, "llmpq long text"),
        ("a" * (LONG_LENGTH + 1), {}, "llmpq long text"),
        ("a", {"bad_words": ["b"]}, "llmpq text"),
        ("a", {"structured_outputs": StructuredOutputsParams(choice=["b"])}, "llmpq text"),
    ],
)
def test_only_short_prompts_without_a_grammar_are_read_in_the_loop(prompt, options, thread):
    prompts = object.__new__(RequestFactory)  # asks nothing of the model
    prompts.threads = prompts.guide_threads = TextThreads()
    prompts.prepare = lambda *_: thread_name()
    assert asyncio.run(prompts.prepare_async(prompt, SamplingParams(**options))) == thread


def test_long_texts_wait_for_each_other_and_not_without_end():
    threads, under_way, most = TextThreads(), [0], [0]

    def work() -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.01)
        under_way[0] -= 1

    async def run() -> None:
        several = [
            asyncio.ensure_future(threads.run(work, LONG_LENGTH + 1)) for _ in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(TooManyTextsError):
            await threads.run(work, LONG_LENGTH + 1)
        several[-1].cancel()  # its client has gone
        await asyncio.gather(*several[:-1])
        await threads.run(work, LONG_LENGTH + 1)  # there is room again

    asyncio.run(run())
    assert most[0] == 1


def test_closed_threads_end_and_texts_are_read_where_they_are():
    threads = TextThreads()
    before = set(threading.enumerate())
    for length in (QUICK_LENGTH + 1, LONG_LENGTH + 1):
        assert asyncio.run(threads.run(thread_name, length)).startswith("llmpq")
    own = set(threading.enumerate()) - before
    threads.close()
    for thread in own:
        thread.join(10)
    assert len(own) == 2 and not any(thread.is_alive() for thread in own)
    for length in (QUICK_LENGTH + 1, LONG_LENGTH + 1):
        assert asyncio.run(threads.run(thread_name, length)) == ""
