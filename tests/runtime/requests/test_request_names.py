"""Names of prompts under way: taken all or none, free again once a request ends however it does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from llmpq import LLM, SamplingParams, StructuredOutputsParams
from llmpq.runtime.entrypoints.response_stream import ResponseStream

pytestmark = pytest.mark.cpu
SHORT = SamplingParams(temperature=0, max_tokens=2)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(demo_model):
    """Return the model in this process."""
    with LLM(demo_model, dtype="float32", max_num_seqs=4, backend="threads") as made:
        yield made


def wait_until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def is_idle(llm: LLM) -> bool:
    return llm.stats()["requests"] == [] and llm.stats()["running"] == 0


def test_a_refused_list_takes_no_name(llm):
    first, second = (llm.prepare("a", SHORT, request_id="k") for _ in range(2))
    other = llm.prepare("b", SHORT, request_id="other")
    with pytest.raises(ValueError, match="'k' is that of prompts 1 and 2"):
        list(llm.as_completed([other, first, second]))
    with pytest.raises(ValueError, match="is that of prompts 0 and 1"):
        list(llm.as_completed([first, first]))
    assert llm.stats()["requests"] == []
    assert len(list(llm.as_completed([first, other]))) == 2


def test_a_name_under_way_is_refused_and_stays_its_owners(llm):
    async def work() -> None:
        begun = await llm.submit("a", LONG, request_id="k")
        with pytest.raises(ValueError, match="'k' is under way"):
            list(llm.as_completed([llm.prepare("b", SHORT), llm.prepare("a", request_id="k")]))
        with pytest.raises(ValueError, match="'k' is under way"):
            [_ async for _ in llm.stream("a", SHORT, request_id="k")]
        with pytest.raises(ValueError, match="'k' is under way"):
            await llm.submit("a", SHORT, request_id="k")
        assert llm.stats()["requests"] == ["k"]
        llm.abort("k")
        assert [d.finish_reason async for d in begun.deltas()][-1] == "abort"

    asyncio.run(work())
    assert llm.stats()["requests"] == []


def test_a_name_is_free_once_its_prompt_has_ended(llm):
    prompts = [llm.prepare("a", SHORT, request_id="k"), llm.prepare("b", LONG)]
    for index, _ in llm.as_completed(prompts):
        assert index == 0 and "k" not in llm.stats()["requests"]
        break
    assert llm.stats()["requests"] == []


def test_an_answer_that_is_not_read_ends_and_gives_up_its_name(llm):
    async def work() -> None:
        begun = await llm.submit("a", SHORT, request_id="k")
        await asyncio.to_thread(wait_until, lambda: is_idle(llm))
        again = await llm.submit("b", LONG, request_id="k")
        text = "".join([delta.text async for delta in begun.deltas()])
        assert text == llm.generate("a", SHORT)[0].text
        begun.give_up()
        assert llm.stats()["requests"] == ["k"], "the name is another's by now"
        again.give_up()

    asyncio.run(work())
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize("read", ["not", "begun"])
def test_a_stream_that_is_dropped_is_aborted(llm, read):
    async def work() -> None:
        begun = await llm.submit("a", LONG, request_id="k")
        if read == "begun":
            async for _ in begun.deltas():
                break
        del begun
        gc.collect()
        await asyncio.to_thread(wait_until, lambda: is_idle(llm))

    asyncio.run(work())


def test_a_stream_is_freed_with_its_event_loop(llm):
    async def work() -> None:
        await llm.submit("a", LONG, request_id="k")

    asyncio.run(work())
    gc.collect()
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize("read", ["not", "begun"])
def test_a_stream_of_another_event_loop_is_an_error_and_not_a_wait(llm, read):
    async def submit() -> ResponseStream:
        begun = await llm.submit("a", LONG, request_id="k")
        if read == "begun":
            await anext(begun.deltas())
        return begun

    async def first_of(begun: ResponseStream) -> None:
        await anext(begun.deltas())

    begun = asyncio.run(submit())
    with pytest.raises(RuntimeError, match="'k' was submitted in another event loop; read it th"):
        asyncio.run(first_of(begun))
    begun.give_up()
    wait_until(lambda: is_idle(llm))


def test_a_stream_keeps_its_llm(demo_model):
    async def work() -> str:
        begun = await LLM(demo_model, backend="threads").submit("a", SHORT)
        return "".join([delta.text async for delta in begun.deltas()])

    assert asyncio.run(work())


def test_an_llm_with_a_dropped_stream_ends(demo_model):
    threads = threading.active_count()

    async def work() -> None:
        llm = LLM(demo_model, backend="threads")
        await llm.submit("a", LONG)

    asyncio.run(work())
    gc.collect()
    wait_until(lambda: threading.active_count() <= threads)


def in_child(work: Callable[[], None]) -> int:
    """Fork, as multiprocessing does on Linux; return the child's exit code, -9 if it hangs."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            work()
            gc.collect()
            os._exit(0)
        os._exit(1)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_forked_child_is_refused_at_every_door_and_leaves_its_parent_alone(demo_model, backend):
    guided = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]+"))
    llm = LLM(demo_model, backend=backend)
    wanted = llm.generate("a", SHORT)[0].text
    running = llm.as_completed([llm.prepare("a", SHORT), llm.prepare("b", LONG)])
    assert next(running)[0] == 0
    doors = [
        lambda: llm.generate("a", SHORT),
        lambda: llm.generate("a", guided),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.prepare("a"),
        lambda: asyncio.run(llm.submit("a" * 10_000)),
        lambda: asyncio.run(anext(llm.stream("a"))),
        lambda: llm.abort("a"),
        llm.stats,
        llm.check_alive,
    ]

    def every_door() -> None:
        nonlocal running
        for door in doors:
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                door()
        del running
        llm.close()

    assert in_child(every_door) == 0
    assert [index for index, _ in running] == [1]
    assert llm.generate("a", SHORT)[0].text == wanted
    llm.close()
