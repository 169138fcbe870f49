"""Whether a job is longer than the model was trained on, and what that means for its positions."""

from __future__ import annotations

from llmpq.model_spec import ModelSpec
from llmpq.workload import Workload


def positions_note(spec: ModelSpec, work: Workload) -> str:
    """Return a warning where a job goes beyond the model's positions, or an empty string.

    `ValueError` for learned positions: there is no row in the table to look up.
    """
    if work.max_len <= spec.max_positions:
        return ""
    beyond = (
        f"--prompt-len {work.prompt_len} and --gen-len {work.gen_len} are beyond the "
        f"{spec.max_positions} positions of {spec.name}"
    )
    if spec.positions == "learned":
        raise ValueError(f"{beyond}; give a smaller --prompt-len or --gen-len")
    if spec.positions == "alibi":
        return f"{beyond}; ALiBi extrapolates, but check the text's quality"
    return f"warning: {beyond}; text past what rotary positions were trained for is often unusable"
