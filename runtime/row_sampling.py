"""How the tokens of a step's rows are chosen, collected once for all steps of the same rows.

Legend: B rows.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.runtime.sampling_params import SamplerConfig


class RowSampling(tuple[SamplerConfig, ...]):
    """What each row asks."""

    @cached_property
    def greedy(self) -> bool:
        """Whether every row's most likely token is taken."""
        return all([config.greedy for config in self])

    @cached_property
    def has_min_p(self) -> bool:
        """Whether a row leaves out tokens that are unlikely beside the most likely one."""
        return any([config.min_p for config in self])

    @cached_property
    def seeds_B(self) -> NDArray[np.uint64]:
        """The seed of each."""
        return np.array([config.seed for config in self], dtype=np.uint64)

    @cached_property
    def choices_3B(self) -> NDArray[np.float64]:
        """Temperature, top-k (0: all) and top-p of each; of greedy ones 1, 1 and 1."""
        rows = [
            (1.0, 1, 1.0)
            if config.greedy
            else (config.temperature, config.top_k or 0, config.top_p)
            for config in self
        ]
        return np.array(rows, dtype=np.float64).reshape(len(rows), 3).T
