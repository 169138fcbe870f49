"""The search of `llmpq-profile tune`: of each product, the few that the model ranks first.

Knows no GPU: `timer` says what a product takes in a configuration (None: as it is chosen now). A
configuration is kept if it is faster twice; one that fails is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmpq.kernels.gemm.ranking.candidates import candidates
from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.machine import Machine
from llmpq.kernels.gemm.ranking.predict import Product, expected_us

_log = logging.getLogger("llmpq.tune")

FEW = 4
"""Configurations tried of a product."""
RING_ROWS = 64
"""Rows of x of a tile for which a ring of x is tried."""
NEAR = 1.25
"""Of the least expected time: beyond, none is tried."""
WORTH_A_CHANGE = 0.998
"""Of the time before: what a new configuration must get under."""

Timer = Callable[[Product, Config | None], float]
"""Microseconds of what holds a product; raises `RuntimeError` where it does not run."""


@dataclass(frozen=True, kw_only=True)
class TunedProduct:
    """What a search of one product came to."""

    product: Product
    config: Config | None
    """None: what is chosen untuned is the fastest of those tried."""
    before_us: float
    us: float
    tried: int


def ranked(product: Product, machine: Machine) -> list[Config]:
    """Return the configurations that the model of the machine expects to be fastest, best first.

    Behind them come tiles among the first whose x passes a ring, which the model does not know.
    """
    times = {c: expected_us(c, product, machine) for c in candidates(product, machine)}
    order = sorted(times, key=lambda config: times[config])
    found = [c for c in order if times[c] <= NEAR * times[order[0]]][:FEW]
    plain = (c for c in found if c.kernel == "splitk_gemm" and c.stages == 1 and c.bm <= RING_ROWS)
    rings = (replace(c, x_stages=3, registers=None) for c in plain)
    return found + list(dict.fromkeys(rings))[: FEW // 2]


def search(
    products: Sequence[Product], machine: Machine, timer: Timer, left_s: Callable[[], float]
) -> tuple[list[TunedProduct], list[Product]]:
    """Try every product in turn until no time is left; returns what was found, and what was not
    reached."""
    found: list[TunedProduct] = []
    for place, product in enumerate(products):
        if left_s() <= 0:
            return found, list(products[place:])
        found.append(_search_one(product, machine, timer, left_s))
    return found, []


def _search_one(
    product: Product, machine: Machine, timer: Timer, left_s: Callable[[], float]
) -> TunedProduct:
    before_us = timer(product, None)
    took: dict[Config, float] = {}
    for config in ranked(product, machine):
        if left_s() <= 0:
            break
        try:
            took[config] = timer(product, config)
        except RuntimeError as error:
            _log.warning("left out %s of %s: %s", config, product, str(error).partition("\n")[0])
    best = min(took, key=lambda config: took[config], default=None)
    us = before_us
    if best is not None and took[best] < WORTH_A_CHANGE * before_us:
        # Once more in turn: a clock that moved in between is no gain.
        before_us = min(before_us, timer(product, None))
        us = max(took[best], timer(product, best))
    won = us < WORTH_A_CHANGE * before_us
    return TunedProduct(
        product=product,
        config=best if won else None,
        before_us=before_us,
        us=us if won else before_us,
        tried=len(took),
    )
