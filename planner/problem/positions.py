"""Whether a job is longer than the model was trained on, and what that means for its positions."""

from __future__ import annotations

from llmpq.model_spec import ModelSpec
from llmpq.workload import Workload


def positions_note(spec: ModelSpec, work: Workload, *, names_context: bool = False) -> str:
    """Return a warning where a job goes beyond the model's positions, or an empty string.

    `names_context`: the length was given as `--context`. `ValueError` for learned positions: there
    is no row in the table to look up.
    """
    if work.max_len <= spec.max_positions:
        return ""
    beyond = (
        f"prompts of {work.prompt_len} and answers of {work.gen_len} tokens are beyond the "
        f"{spec.max_positions} positions of {spec.name}"
    )
    if spec.positions == "learned":
        smaller = "--context" if names_context else "--prompt-len or --gen-len"
        raise ValueError(f"{beyond}; give a smaller {smaller}")
    if spec.positions == "alibi":
        return f"{beyond}; ALiBi extrapolates, but check the text's quality"
    return f"warning: {beyond}; text past what rotary positions were trained for is often unusable"
