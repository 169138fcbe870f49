"""The driver's record of a running request: enough to go on with it on other stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llmpq.errors import RequestFailedError
from llmpq.runtime.requests.request import Finished, Request, RequestOutputDelta
from llmpq.runtime.requests.token_rules import LogprobOutput, TokenScores

Listener = Callable[[RequestOutputDelta], None]
"""Called in the engine's thread; it may not wait."""


@dataclass(eq=False, kw_only=True)
class RequestRecord:
    """A request, its tokens so far, and the listener that gets them."""

    request: Request
    listener: Listener
    submitted_s: float
    """By `time.perf_counter`, as all times here."""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    """Of its tokens, in order; the last stage may be ahead of the first."""
    num_scores_given: int = 0
    """How many of them the listener has."""
    prompt_scores: list[TokenScores] = field(default_factory=list)
    """Of its prompt, until the listener has them."""
    first_token_s: float | None = None
    begun: bool = False
    """Whether the engine has it."""
    held: bool = False
    """Whether it is held back from the engine."""
    begun_s: float = 0.0
    """When it was given to the engine that has it now."""
    num_before: int = 0
    """Tokens that it had then."""
    strikes: int = 0
    """Engines in a row that were lost before they brought a token of it."""
    strikes_alone: int = 0
    """Of them, those that had nothing else to do."""
    aborted: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """Lower ones are scheduled first."""
        return self.request.priority, self.submitted_s

    @property
    def brought_nothing(self) -> bool:
        """Whether the engine that has it has brought no token of it."""
        return self.begun and len(self.tokens) == self.num_before

    def take(self, tokens: list[int], noted: LogprobOutput | None, now_s: float) -> None:
        """Add what the stages brought."""
        if tokens and self.first_token_s is None:
            self.first_token_s = now_s
        if tokens:
            self.strikes = self.strikes_alone = 0
        self.tokens += tokens
        if noted is not None:
            self.scores += noted.output
            self.prompt_scores += noted.prompt

    def given(self, *, ended: bool) -> LogprobOutput | None:
        """Return the scores that the listener has not got: of the tokens it has, or of all."""
        end = len(self.scores) if ended else min(len(self.scores), len(self.tokens))
        new, self.num_scores_given = self.scores[self.num_scores_given : end], end
        prompt, self.prompt_scores = self.prompt_scores, []
        return LogprobOutput(output=new, prompt=prompt) if new or prompt else None

    def resumed(self, now_s: float, *, awaited: bool = False) -> Request:
        """Return the request as fresh stages get it: it goes on from the tokens that are here.

        `awaited`: every token is waited for.
        """
        request, rules, left_s = self.request, self.request.rules, self.request.timeout_s
        self.begun = True
        self.held = False
        self.begun_s = now_s
        self.num_before = len(self.tokens)
        del self.scores[len(self.tokens) :]
        if rules is not None and self.tokens:
            # The prompt was scored before its first token came.
            rules = replace(rules, answer=tuple(self.tokens), prompt_logprobs=None)
        if left_s is not None:
            left_s = max(1e-3, left_s - (now_s - self.submitted_s))
        return replace(
            request,
            output=list(self.tokens),
            rules=rules,
            timeout_s=left_s,
            stream=request.stream or awaited,
        )

    def ended(self, finished: Finished, now_s: float) -> Finished:
        """Return an end with the times since the request was submitted first."""
        late_s = self.begun_s - self.submitted_s
        if not late_s:
            return finished
        first_s = late_s + finished.first_token_s
        if self.first_token_s is not None:
            first_s = self.first_token_s - self.submitted_s
        return replace(
            finished,
            first_token_s=first_s,
            total_s=now_s - self.submitted_s,
            queue_s=0.0 if self.num_before else late_s + finished.queue_s,
        )

    def end(self, now_s: float, *, failure: str | None = None) -> RequestOutputDelta:
        """Return the end of a request that no stage has: aborted, or failed for a reason."""
        first_s = self.first_token_s or now_s
        finished = Finished(
            id=self.request.id,
            tokens=list(self.tokens),
            finish_reason="abort" if failure is None else "error",
            first_token_s=first_s - self.submitted_s,
            total_s=now_s - self.submitted_s,
            failure=failure,
        )
        del self.scores[len(self.tokens) :]
        return RequestOutputDelta(
            id=self.request.id,
            finished=finished,
            noted=self.given(ended=True),
            error=None if failure is None else RequestFailedError(failure),
            heard_s=now_s,
        )
