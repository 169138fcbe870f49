"""Factors on a problem's times: what its costs would be if measured times were wrong.

Every layer's time has one by phase, micro-batch size, class of devices and choice, every end (an
embedding, a head) by class, every link by the two classes that it joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmpq.costs.cost_model import Phase
from llmpq.planner.costs.links import ClassLinks, Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class CostFactors:
    """What times are multiplied by, of the classes and choices of one problem."""

    layer: Mapping[tuple[Phase, int], Floats]
    """[C, B] by phase and micro-batch size."""
    ends: Mapping[tuple[Phase, int], Floats]
    """[C, 2]."""
    links: Floats
    """[C, C]."""

    def of_links(self, links: ClassLinks) -> ClassLinks:
        """Return links whose messages take so many times as long."""
        terms = {pair: own * float(self.links[pair]) for pair, own in links.terms.items()}
        return ClassLinks(classes=links.classes, terms=terms)
