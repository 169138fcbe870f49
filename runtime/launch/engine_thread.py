"""A running pipeline for many callers: a thread hands each the outputs of its requests.

The driver's record of every request (request_record.py) outlives the stages. When a stage is lost,
the thread has others started in its place (engine_starter.py) and gives them what has not ended,
from the tokens so far on: callers hear nothing for a while, and then go on to hear tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from llmpq.child import CallFailed
from llmpq.errors import DeadlineError, LlmpqError, RequestFailedError, StageLostError
from llmpq.runtime.launch.engine_starter import EngineStarter, Replanned
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.poison import PoisonHunt
from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.launch.request_record import Listener, RequestRecord
from llmpq.runtime.requests.request import EngineOutputs, Progress, Request, RequestOutputDelta
from llmpq.runtime.requests.token_rules import Guide, LogprobOutput

_END_S = 5.0
"""How long the loops may take to end before the stages are taken down."""
_LOSSES = (LlmpqError, ValueError, OSError, RuntimeError, CallFailed)
"""What ends an engine and not the driver: whatever was raised in a stage, or its silence."""
_log = logging.getLogger("llmpq.run")


class EngineThread:
    """Owns a running pipeline and the thread that reads its outputs."""

    def __init__(
        self,
        client: PipelineClient,
        stack: ExitStack,
        starter: EngineStarter | None = None,
        *,
        max_rows: int = 1,
    ) -> None:
        """`stack` takes the engine down.

        `starter`: starts others when stages are lost; without it a loss is the end. `max_rows`:
        requests that run at once.
        """
        self.client = client
        """What reaches the stages; another one once lost stages were replaced."""
        self._stack = stack
        self._starter = starter
        self._records: dict[int, RequestRecord] = {}
        """Requests that have not ended, by id."""
        self._ruled: set[int] = set()
        """Running requests whose rules the last stage has."""
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._suspect: tuple[PipelineClient, BaseException] | None = None
        """An engine that a caller found lost before this thread did."""
        self._closed = False
        self._moved = threading.Event()
        """Set once the stages are those of a plan that was chosen, or there are none."""
        self._max_rows = max_rows
        self._hunt = PoisonHunt(max_rows)
        self.recovery: Recovery | None = None
        """What is being recovered; None while the stages work."""
        self._base = self.progress = Progress()
        """Counters of engines that were lost, and of all."""
        self._thread = threading.Thread(target=self._read, daemon=True, name="llmpq news")
        self._thread.start()

    def submit(self, requests: Sequence[Request], listener: Listener) -> None:
        """Queue requests; the listener gets the outputs of each until it has ended."""
        self.submit_all([(requests, listener)])

    def submit_all(self, asked: Sequence[tuple[Sequence[Request], Listener]]) -> None:
        """Queue the requests of several callers in one call of the stages, all or none."""
        now_s, recorded = time.perf_counter(), self._starter is not None
        records = [
            RequestRecord(
                request=replace(request, recorded=recorded),
                listener=listener,
                submitted_s=now_s,
                tokens=list(request.output),
            )
            for own, listener in asked
            for request in own
        ]
        self._queue(records, now_s)

    def take_back(self, request_id: int) -> RequestRecord | None:
        """Return a request that has not ended, with its tokens so far, and end it here unheard.

        None where it has ended, or where its tokens are not known here.
        """
        with self._lock:
            record = self._records.get(request_id)
            if record is None or record.aborted or not record.request.recorded:
                return None
            del self._records[request_id]
            self._ruled.discard(request_id)
            engine, away = self.client, self.recovery is not None
        if not away:
            try:
                engine.abort([request_id])
            except Exception as error:
                if not self._is_lost(engine, error):
                    raise
        return record

    def tokens_of(self, request_id: int) -> Sequence[int]:
        """Return the tokens of a request that are known to have come; none where it has ended."""
        record = self._records.get(request_id)
        return () if record is None else record.tokens

    def adopt(self, record: RequestRecord) -> None:
        """Go on with a request that another engine gave back, for the same listener."""
        self._queue([record], time.perf_counter())

    def _queue(self, records: Sequence[RequestRecord], now_s: float) -> None:
        """Give requests to the stages, all or none."""
        with self._lock:
            self._require_open()
            self._records |= {record.request.id: record for record in records}
            self._ruled |= {r.request.id for r in records if r.request.rules is not None}
            if self.recovery is not None or self._hunt.holds_all:
                return  # the stages get them when there are any
            engine, requests = self.client, [record.resumed(now_s) for record in records]
        try:
            engine.submit(requests, more=True)
        except BaseException as error:
            if self._is_lost(engine, error):
                return
            with self._lock:
                for record in records:
                    self._records.pop(record.request.id, None)
                    self._ruled.discard(record.request.id)
            raise

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests between steps; their listeners get that as any end."""
        if not request_ids or self._error is not None or self._closed:
            return
        with self._lock:
            known = [self._records[one] for one in request_ids if one in self._records]
            for record in known:
                record.aborted = True
            engine, away = self.client, self.recovery is not None
            waiting = [record for record in known if away or not record.begun]
        self._end_records(waiting)
        if away:
            return
        try:
            engine.abort(request_ids)
        except Exception as error:
            if not self._is_lost(engine, error):
                raise

    def reset_prefix_cache(self) -> None:
        """Let requests to come find no prefix of those before.

        Stages that take the place of lost ones begin with none.
        """
        with self._lock:
            self._require_open()
            engine, away = self.client, self.recovery is not None
        if away:
            return
        try:
            engine.reset_prefix_cache()
        except Exception as error:
            if not self._is_lost(engine, error):
                raise

    def wait_for_guide(self, guide: Guide) -> None:
        """Return once the last stage has compiled a guide, or is lost: the next one compiles it."""
        engine = self.client
        try:
            engine.wait_for_guide(guide)
        except Exception as error:
            if not self._is_lost(engine, error):
                raise

    def close(self, last: Callable[[PipelineClient], None] | None = None) -> None:
        """End all requests and the stages; `last` is called between, unless a stage was lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if (
            threading.current_thread() is self._thread
        ):  # the last caller was dropped by its listener
            threading.Thread(target=self._take_down, args=(last,), name="llmpq end").start()
        else:
            self._take_down(last)

    def _take_down(self, last: Callable[[PipelineClient], None] | None) -> None:
        with self._lock:
            left, away = list(self._records), self.recovery is not None
        try:
            if away and self._starter is not None:
                self._starter.cancel()
                self._thread.join(_END_S)
            elif self._error is None:
                self.client.abort(left)
                self.client.submit((), more=False)
                self._thread.join(_END_S)
                if last is not None and self._error is None:
                    last(self.client)
        except Exception as error:  # whatever it is, the stages are taken down
            self._fail(error)
        finally:
            self._stack.close()
            self._thread.join(_END_S)
            self._fail(StageLostError("the engine was closed"))

    def move_to(self, made: Replanned, *, reason: str, action: str) -> Recovery:
        """Go on by another plan; return once its stages have what is under way.

        The steps under way end first. `RuntimeError` while stages are recovered, or where there is
        no record of requests.
        """
        with self._lock:
            self._require_open()
            if self._starter is None:
                raise RuntimeError(
                    "with on_loss='stop' there is no record of requests, without which none can go "
                    "on elsewhere: start with on_loss='restart' or 'replan'"
                )
            if self.recovery is not None:
                raise RuntimeError("stages are being recovered: try again once they serve")
            self._moved.clear()
            self.recovery = recovery = self._starter.planned(made, reason=reason, action=action)
            engine = self.client
        try:
            engine.halt()
        except Exception as error:
            if not self._is_lost(engine, error):
                raise
        self._moved.wait()
        if self._error is not None:
            raise self._error
        return recovery

    def check_alive(self) -> None:
        """Raise what ended the engine, if it has ended."""
        self._require_open()

    def stats(self) -> Mapping[str, Any]:
        """Return the counters of the whole run."""
        return asdict(self.progress)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed; make another one")
        if self._error is not None:
            raise self._error

    def _is_lost(self, engine: PipelineClient, error: BaseException) -> bool:
        """Whether an error means that an engine is lost, so that another one takes its place.

        A caller's error may come before this thread's: the engine is given up then.
        """
        lost = isinstance(error, (StageLostError, DeadlineError, CallFailed))
        if not lost or self._starter is None or self._closed or self._error is not None:
            return False
        with self._lock:
            if engine is self.client and self.recovery is None:
                self._suspect = engine, error
        return True

    def _read(self) -> None:
        """Hand out outputs until the loops have ended, or stages are lost for good."""
        while True:
            try:
                self._hand_out(self.client)
                if self.recovery is None or not self._may_recover():
                    return
                try:
                    self._go_on([])
                except BaseException as final:
                    self._fail(final)
                    return
            except BaseException as error:
                if not (self._may_recover() and isinstance(error, _LOSSES)):
                    self._fail(error)
                    return
                try:
                    self._recover(error)
                except BaseException as final:
                    self._fail(final)
                    return

    def _hand_out(self, engine: PipelineClient) -> None:
        """Hand out an engine's outputs until its loops have ended."""
        for update in engine.updates():
            suspect = self._suspect
            if suspect is not None and suspect[0] is engine:
                raise suspect[1]
            noted, now_s = self._noted(update), time.perf_counter()
            self.progress = _sum(self._base, update.progress)
            for number, tokens in update.tokens.items():
                record = self._records.get(number)
                if record is None:
                    continue
                record.take(list(tokens), noted.get(number), now_s)
                if record.request.stream or not record.request.recorded:
                    own = record.given(ended=False)
                    record.listener(
                        RequestOutputDelta(id=number, tokens=tokens, noted=own, heard_s=now_s)
                    )
            for finished in update.finished:
                with self._lock:
                    record = self._records.pop(finished.id, None)
                if record is None:
                    continue
                own = noted.get(finished.id)
                if finished.id not in update.tokens:
                    record.take([], own, now_s)
                failure = finished.failure
                if own is not None and own.failure is not None:
                    finished = replace(finished, finish_reason="error", failure=own.failure)
                record.listener(
                    RequestOutputDelta(
                        id=finished.id,
                        finished=record.ended(finished, now_s),
                        noted=record.given(ended=True),
                        error=None if failure is None else RequestFailedError(failure),
                        heard_s=now_s,
                    )
                )
            if self._starter is not None and (update.tokens or update.finished):
                self._starter.recovered()
                self._release(engine)

    def _noted(self, update: EngineOutputs) -> dict[int, LogprobOutput]:
        """Return the scores that belong to an update's tokens; who ended is forgotten."""
        ended = [f.id for f in update.finished if f.id in self._ruled]
        asked = {*ended, *(number for number in update.tokens if number in self._ruled)}
        if not asked:
            return {}
        found = self.client.noted(sorted(asked), ended)
        self._ruled.difference_update(ended)
        return found

    def _may_recover(self) -> bool:
        return self._starter is not None and not self._closed

    def _recover(self, error: Exception) -> None:
        """Have other stages started, and give them what has not ended; raise where that fails."""
        assert self._starter is not None
        with self._lock:
            self.recovery = self._starter.lost(error)
            raised, failed = self.client.was_refused, []
            if self.client.loss != "device":  # else the card says that it is no request's doing
                failed = self._hunt.note_loss(self._records.values(), raised=raised)
            self._suspect = None
            aborted = [record for record in self._records.values() if record.aborted]
        _log.warning("%s; it is recovered", error)
        self._end_records(failed, failure=f"the request ends every stage that gets it: {error}")
        if self._hunt.broken():
            if not self._starter.distrust(error):
                raise error
            self._hunt = PoisonHunt(self._max_rows)
        self._go_on(aborted)

    def _go_on(self, aborted: Sequence[RequestRecord]) -> None:
        """Have stages started, and give them what has not ended."""
        assert self._starter is not None
        with self._lock:
            self._base = replace(self.progress, waiting=0, running=0, gauges={})
        self._end_records(aborted)
        while True:
            engine = self._starter.restart()
            try:
                self._resubmit(engine)
                break
            except _LOSSES as again:
                if not self._may_recover():
                    raise
                self._starter.lost(again)
        begun = [record for record in self._records.values() if record.begun]
        self._starter.resubmitted(
            num_requests=len(begun), num_kept=sum(record.num_before for record in begun)
        )
        self._moved.set()

    def _resubmit(self, engine: PipelineClient) -> None:
        """Give fresh stages what has not ended, also what comes meanwhile."""
        self._end_unfitting()
        with self._lock:
            if self._closed:
                raise StageLostError("the engine was closed")
            self.client = engine
            records = self._hunt.chosen(list(self._records.values()))
            for record in self._records.values():
                record.begun, record.held = False, record not in records
        while True:
            now_s = time.perf_counter()
            with self._lock:
                alone = self._hunt.holds_all
                requests = [r.resumed(now_s, awaited=alone) for r in records]
            engine.submit(requests, more=True)
            with self._lock:
                waiting = [r for r in self._records.values() if not (r.begun or r.held)]
                records = [] if alone else waiting
                if not records:
                    self.recovery = None
                    return

    def _end_unfitting(self) -> None:
        """Fail the requests for which another plan has no room."""
        assert self._starter is not None
        limits = self._starter.limits
        for record in list(self._records.values()) if limits is not None else ():
            try:
                assert limits is not None
                limits.check(record.request)
            except ValueError as error:
                self._end_records([record], failure=f"the devices left have no room: {error}")

    def _release(self, engine: PipelineClient) -> None:
        """Give the engine requests that were held back, once nothing speaks against it."""
        with self._lock:
            records = self._hunt.released(list(self._records.values()))
            requests = [record.resumed(time.perf_counter()) for record in records]
        if requests:
            engine.submit(requests, more=True)

    def _end_records(self, records: Sequence[RequestRecord], *, failure: str | None = None) -> None:
        """End requests that no stage has any more."""
        for record in records:
            number = record.request.id
            with self._lock:
                known = self._records.pop(number, None)
                self._ruled.discard(number)
            if known is not None:
                record.listener(record.end(time.perf_counter(), failure=failure))

    def _fail(self, error: BaseException) -> None:
        """End all listeners that still wait with the error."""
        with self._lock:
            self._error = self._error or error
            self.recovery = None
            left, self._records = self._records, {}
        self._moved.set()
        for number, record in left.items():
            record.listener(RequestOutputDelta(id=number, error=self._error))


def _sum(before: Progress, now: Progress) -> Progress:
    """Return the counters of engines that were lost and of the one that runs."""
    return replace(
        now,
        finished=before.finished + now.finished,
        prompt_tokens=before.prompt_tokens + now.prompt_tokens,
        generated_tokens=before.generated_tokens + now.generated_tokens,
    )
