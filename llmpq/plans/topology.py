"""A plan of several engines: which pipelines serve a model side by side, and who gets which rows.

The file is a plan (`plan.json`) with `engines` in place of stages: each has its own `plan`, as one
engine alone would have it, and its share of the job's rows. Engines have no device in common.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from llmpq.errors import BadPlanError
from llmpq.file_form import FileForm, read_json
from llmpq.plans.plan import ClusterRef, ModelRef, Plan, SolverReport, StagePlan
from llmpq.workload import Workload


class EngineShare(FileForm):
    """An engine and its share of the job."""

    rows: int = Field(gt=0)
    """Of the job's rows; where they are more than the plan has in flight, they follow as others
    end."""
    plan: Plan

    @property
    def waves(self) -> int:
        """How often the plan's rows in flight make the engine's rows."""
        return -(-self.rows // self.plan.workload.batch)

    @property
    def predicted_s(self) -> float | None:
        """Seconds of all its rows; None where nothing is predicted."""
        predicted = self.plan.predicted
        return None if predicted is None else self.waves * predicted.total_s

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted output tokens/s."""
        seconds = self.predicted_s
        return None if not seconds else self.rows * self.plan.workload.gen_len / seconds


class TopologyPredicted(FileForm):
    """What the planner expects of all engines together."""

    total_s: float
    """Until the last engine has ended its rows."""
    output_tokens_per_s: float
    sum_omega: float
    """The largest of the engines' quality losses."""


class Topology(FileForm):
    """Engines that share a job, on disjoint devices of one cluster."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    engines: tuple[EngineShare, ...] = Field(min_length=1)
    workload: Workload
    """The whole job: `batch` are the rows of all engines."""
    predicted: TopologyPredicted | None = None
    solver: SolverReport = SolverReport(method="hand", status="hand-written")
    """Of the topology; each engine's plan has its own."""

    @model_validator(mode="after")
    def _engines_agree(self) -> Self:
        first = self.engines[0].plan
        for number, engine in enumerate(self.engines):
            plan = engine.plan
            for name in ("model", "cluster"):
                ours, other = getattr(first, name).fingerprint, getattr(plan, name).fingerprint
                if ours != other:
                    raise ValueError(
                        f"engine {number} was planned for another {name} than engine 0 ({other} "
                        f"instead of {ours}); plan all engines together with llmpq-algo"
                    )
        names = [place.device for place in self.places]
        if len(set(names)) != len(names):
            raise ValueError(f"engines share a device: {names}; each device is of one engine")
        rows = sum(engine.rows for engine in self.engines)
        if rows != self.workload.batch:
            raise ValueError(
                f"the engines' rows are {rows} together, expected the batch of "
                f"{self.workload.batch}"
            )
        return self

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The engines' plans."""
        return tuple(engine.plan for engine in self.engines)

    @property
    def model(self) -> ModelRef:
        """The model that all engines serve."""
        return self.engines[0].plan.model

    @property
    def cluster(self) -> ClusterRef:
        """The cluster that the devices are of."""
        return self.engines[0].plan.cluster

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of all engines, one engine behind the other."""
        return tuple(stage for engine in self.engines for stage in engine.plan.stages)

    @property
    def places(self) -> tuple[StagePlan, ...]:
        """The devices of all stages, each as a stage that has its layers alone."""
        return tuple(place for engine in self.engines for place in engine.plan.places)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a plan of several engines; `BadPlanError` names what is wrong with it."""
        try:
            data = read_json(path)
            if isinstance(data, dict) and "engines" not in data and "stages" in data:
                raise ValueError(
                    f"'{path}' is a plan of a single engine, expected one of several: "
                    "LLM(model, plan=...) runs it, and llmpq-algo --engines 2 plans two"
                )
            return cls.parse_data(data, where=str(path))
        except ValueError as error:
            raise BadPlanError(str(error)) from None


def read_plan(path: str | Path) -> Plan | Topology:
    """Read a plan file, of one engine or of several; `BadPlanError` names what is wrong."""
    try:
        data = read_json(path)
    except ValueError as error:
        raise BadPlanError(str(error)) from None
    several = isinstance(data, dict) and "engines" in data
    return Topology.load(path) if several else Plan.load(path)
