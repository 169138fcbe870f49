"""PromptAnswerer: what `LLM` and `Engines` have in common for those who answer many prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.report.progress import ProgressReporter
from llmpq.runtime.requests.request import Progress
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.text.request_factory import PreparedPrompt


class PromptAnswerer(ABC):
    """Answers prepared prompts, until `close` or the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what is under way and take the stages down; again does nothing."""

    @property
    @abstractmethod
    def plan(self) -> Plan | Topology:
        """Who holds which layers at which bits, and what was predicted."""

    @abstractmethod
    def plan_of(self, output: RequestOutput) -> Plan:
        """Return the plan under which an answer ended."""

    @abstractmethod
    def live_stats(self) -> dict[str, Any]:
        """Return counters of the run so far and what every stage has computed; asks the stages."""

    @abstractmethod
    def as_completed(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield index and answers of prepared prompts as each has ended, as `LLM.as_completed`."""

    @abstractmethod
    def begun(self, prompt: PreparedPrompt) -> tuple[int, Sequence[int]]:
        """Return which engine answers a prompt, and the tokens of its first answer so far."""

    def progress_of(
        self, prompts: Sequence[PreparedPrompt], num_rows: int, *, quiet: bool = False
    ) -> ProgressReporter:
        """Return what shows how far prompts are, of so many rows, and what the stages do."""
        most_tokens = sum(prompt.most_tokens for prompt in prompts)
        return ProgressReporter.of_plan(
            self.plan, num_rows, most_tokens=most_tokens, stats=self.live_stats, quiet=quiet
        )


def all_answers(
    answerer: PromptAnswerer, prompts: Sequence[PreparedPrompt], *, use_tqdm: bool
) -> list[RequestOutput]:
    """Return the answers to prepared prompts, in their order; several show how far they are."""
    done: dict[int, RequestOutput] = {}
    quiet = not use_tqdm or len(prompts) < 2
    with answerer.progress_of(prompts, len(prompts), quiet=quiet) as shown:
        for index, output in answerer.as_completed(
            prompts, on_progress=lambda progress: shown.update(progress, len(done))
        ):
            done[index] = output
            shown.end(output, prompts[index].most_tokens)
    return [done[index] for index in range(len(prompts))]
