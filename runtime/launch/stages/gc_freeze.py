"""Keeps what a process has loaded out of garbage collection."""

from __future__ import annotations

import atexit
import gc


def gc_freeze() -> None:
    """Spare the garbage collector whatever there is now: modules, the model, the tokenizer.

    It looks through all of it every few thousand objects, for a tenth of a second in which no token
    goes anywhere. For processes that are ours alone; what becomes garbage later is collected.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries look at their end whether anything is left
