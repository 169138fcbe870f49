"""What a process has of a stage that it left: layers, and a GPU's stream.

The next stage in the same process uses them (`StageWorker.successor`). KV, captured graphs and
links are of the stage that was left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmpq.plans.plan import Plan
from llmpq.runtime.links.member_links import AllReduce
from llmpq.runtime.models.stage_model import HeldParts


@dataclass(frozen=True, kw_only=True)
class HeldStage:
    """Layers of a plan that lie on a device."""

    plan: Plan
    parts: HeldParts | None
    stream: torch.cuda.Stream | None
    """On which a GPU's stage computed; memory that is free belongs to it."""
    reduce: AllReduce | None
    """The sum over the devices of a shared stage, which its layers call."""

    def parts_for(self, plan: Plan) -> HeldParts | None:
        """Return the parts, where another plan is of the same model and rounds layers alike."""
        same = self.plan.model.fingerprint == plan.model.fingerprint
        before, now = (
            one.quantization.model_copy(update={"head_bits": None}) for one in (self.plan, plan)
        )
        return self.parts if same and before == now else None
