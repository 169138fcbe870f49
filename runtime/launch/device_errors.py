"""Tells what a GPU reports from what is wrong with a program, by the words of the error.

An error comes from a stage's process as text: CUDA's names for what it returns (cudaGetErrorString,
CUDA 13), which torch, Triton and NCCL repeat in sentences of their own. What follows from a kind is
in engine_thread.py (which requests are suspected) and engine_starter.py (which devices are given
up). Knows no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

LossKind = Literal["process", "silence", "connection", "device", "kernel", "memory", "error"]
"""Why a stage was lost.

process     it died and said nothing that is known
silence     it did not answer, or not end a step, within its deadline
connection  its connection to another stage broke
device      its device reports a fault of its own, or is gone: no request is to blame
kernel      its device ended a kernel: by a request, by a bug, or by a fault
memory      no memory was left
error       anything else that was raised: a bug, or what a request asked for
"""


@dataclass(frozen=True, kw_only=True)
class DeviceError:
    """What errors with certain words mean, and what to do."""

    kind: LossKind
    words: re.Pattern[str]
    advice: str


def _row(kind: LossKind, words: str, advice: str) -> DeviceError:
    return DeviceError(kind=kind, words=re.compile(words, re.IGNORECASE), advice=advice)


TABLE = (
    _row(
        "device",
        r"uncorrectable (ECC|NVLink) error|hardware stack error|or a hardware error"
        r"|integrity checks failed",
        "the card reports a fault of its own: look at nvidia-smi -q{card} and for 'NVRM: Xid' in "
        "the host's dmesg, reset the card, and replace it if the fault comes again",
    ),
    _row(
        "device",
        r"no CUDA-capable device|fallen off the bus|GPU is lost|is/are busy or unavailable"
        r"|system not yet initialized|MPS (client|server)|driver shutting down"
        r"|(CUDA (driver )?error|\[CUDA\]|Cuda failure)\W+unknown error",
        "the card or its driver no longer answers: look at nvidia-smi -q{card} and for 'NVRM: Xid' "
        "in the host's dmesg; another program may hold the card, else reset it or start the host "
        "anew",
    ),
    _row(
        "kernel",
        r"unspecified launch failure|illegal memory access|illegal instruction"
        r"|misaligned address|invalid program counter|global/shared address space"
        r"|device-side assert|the launch timed out",
        "the card ended a kernel: by a fault of its own if 'NVRM: Xid' 48, 63, 74, 79, 92, 94 or "
        "95 stands in the host's dmesg, else by one of the program's",
    ),
    _row(
        "connection",
        r"NCCL|WorkNCCL|collective operation timeout",
        "look at the stage that ended first, and at the links between the GPUs",
    ),
)
"""The first row whose words an error has is what it means."""


def device_error(text: str) -> DeviceError | None:
    """Return what an error's text says of a device or its links; None: nothing."""
    return next((row for row in TABLE if row.words.search(text)), None)
