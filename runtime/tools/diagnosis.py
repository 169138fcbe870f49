"""Diagnoses a survey of nodes: what each device can run, what is wrong, what to do about it.

Pure: plain values in (stages/node_survey.py has their form), sentences out. No torch, no Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmpq.kernels import kernel_table
from llmpq.kernels.kernel_table import Kernel, KernelForm
from llmpq.runtime.launch.nodes.node_report import differing, versions_of
from llmpq.units import format_size

Survey = Mapping[str, Any]

WHEELS = "https://download.pytorch.org/whl"
_LEAST = {"torch": (2, 11), "ray": (2, 52)}
"""Oldest versions that the project is written for."""
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 6), "cu126"))
"""Builds of torch's wheels by the CUDA that a driver must serve, newest first."""
_OLD_BUILD, _NEWER_FROM = "cu126", (7, 5)
"""The last build with code for cards older than this."""
_LITTLE = 0.1
_SHM_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to know: an error keeps a device from running, advice does not."""

    level: Literal["error", "advice"]
    text: str
    """What is so, and what to do."""


@dataclass(frozen=True, kw_only=True)
class DeviceLine:
    """A device and what it can run."""

    node: str
    device: str
    memory: str
    runs: str
    """What it runs, or why it runs nothing."""
    usable: bool
    stored: str = ""
    """What becomes of checkpoints' number formats on it."""


def device_lines(survey: Survey) -> list[DeviceLine]:
    """Return a line per GPU, and one of the cores."""
    node, cpu = str(survey["host"]), survey["cpu"]
    lines = [_gpu_line(survey, number, gpu) for number, gpu in enumerate(survey["gpus"])]
    dtypes = ", ".join([*cpu["quick_dtypes"], "float32"])
    free = f"{cpu['threads']} free thread{'' if cpu['threads'] == 1 else 's'}"
    return [
        *lines,
        DeviceLine(
            node=node,
            device=f"CPU: {cpu['reported']}, {free}",
            memory=_memory(cpu),
            runs=f"{dtypes}, all precisions (w3a16 to w8a16 unpacked), all KV bits",
            usable=True,
            stored=f"{FLOAT_CODES}, int4, int8: codes as stored, multiplied by the CPU's kernels",
        ),
    ]


def products(surveys: Sequence[Survey]) -> list[dict[str, Any]]:
    """Return for each sort of device which kernel multiplies which weight (kernel_table.py)."""
    devices: dict[kernel_table.Device, str] = {}
    for survey in surveys:
        for card in survey["gpus"]:
            device = _device(card)
            devices.setdefault(device, f"{card['reported']} (sm_{device[1]}{device[2]})")
        level = survey["cpu"]["compiled_for"]
        devices.setdefault(kernel_table.cpu(level), f"CPU ({level})")
    return [
        {
            "device": name,
            "summary": [
                {"weight": weight, "kernels": text} for weight, text in kernel_table.summary(device)
            ],
            "lines": [
                {
                    "weight": line.form.value,
                    "rows": line.span,
                    "kernel": line.kernel.value,
                    "does": kernel_table.HELP[line.kernel],
                    "file": f"kernels/{line.file}",
                    "quickest_of": line.ranked,
                    "needs": line.needs,
                }
                for line in kernel_table.device_lines(device)
            ],
        }
        for device, name in devices.items()
    ]


def findings(survey: Survey) -> list[Finding]:
    """Return what is wrong on one node."""
    host = survey["host"]
    found = _of_versions(survey) + _of_torch(survey)
    for number, gpu in enumerate(survey["gpus"]):
        name = f"{host}: GPU {number} ({gpu['reported']})"
        if _torch_serves(survey) and not _has_code(gpu["capability"], survey["torch_arches"]):
            found.append(
                _error(
                    f"{name} has compute capability {gpu['capability']}, torch "
                    f"{survey['packages'].get('torch')} holds code for "
                    f"{', '.join(survey['torch_arches'])} only: "
                    f"{_install(survey, gpu['capability'])}, or leave the card out with "
                    "CUDA_VISIBLE_DEVICES"
                )
            )
        failed = _failed_product(survey, number)
        if _gpu_runs(survey, gpu)[1] and failed is not None:
            found.append(
                _error(
                    f"{name} computes wrongly: {failed}; see dmesg and nvidia-smi -q for its "
                    "errors, reset or replace the card, or leave it out with CUDA_VISIBLE_DEVICES"
                )
            )
        if gpu["kind"] is None:
            found.append(
                _advice(
                    f"{name} is not in the table of cards, its speed is a guess: measure it with "
                    "llmpq-dist run --profile, or describe it by 'spec' in a cluster YAML"
                )
            )
        total, free = gpu["total_bytes"], gpu["free_bytes"]
        if total and free is not None and free < _LITTLE * total:
            found.append(
                _advice(
                    f"{name} has {format_size(free)} of {format_size(total)} free: see with "
                    "nvidia-smi who uses it"
                )
            )
    if survey["shm_bytes"] is not None and survey["shm_bytes"] < _SHM_BYTES:
        found.append(
            _advice(
                f"{host}: /dev/shm has {format_size(survey['shm_bytes'])}, Ray keeps 80 MiB there: "
                "start the container with --shm-size=1g"
            )
        )
    return found


def differences(surveys: Sequence[Survey]) -> list[Finding]:
    """Return which versions differ between nodes that would share a pipeline."""
    found, first = [], surveys[0]
    for other in surveys[1:]:
        for name, wanted, got in differing(versions_of(first), versions_of(other)):
            found.append(
                _error(
                    f"{other['host']} has {name} {got or 'not installed'}, {first['host']} has "
                    f"{wanted or 'none'}: install the same version on every node"
                )
            )
    return found


def _gpu_line(survey: Survey, number: int, gpu: Mapping[str, Any]) -> DeviceLine:
    text, usable = _gpu_runs(survey, gpu)
    failed = _failed_product(survey, number)
    if usable and failed is not None:
        text, usable = f"nothing: a product on it failed ({failed})", False
    return DeviceLine(
        node=str(survey["host"]),
        device=f"GPU {number}: {gpu['reported']}, sm_{gpu['capability'].replace('.', '')}, "
        f"driver {gpu['driver']}",
        memory=_memory(gpu),
        runs=text,
        usable=usable,
        stored=_gpu_stored(survey, gpu) if usable else "",
    )


FLOAT_CODES = "FP8, NVFP4, MXFP4, NF4"
"""Number formats of checkpoints whose codes stay as they are: no device needs instructions for
them."""


def _gpu_stored(survey: Survey, gpu: Mapping[str, Any]) -> str:
    """Return how a GPU that runs multiplies the number formats of checkpoints."""
    both, device = f"{FLOAT_CODES}, int4, int8", _device(gpu)
    kernels = kernel_table.eligible(KernelForm.FP8_WORDS, device, 1)
    if "triton" not in survey["packages"] or Kernel.DEQUANTIZE not in kernels:
        return f"{both}: codes as stored, unpacked by torch operators for each product"
    if Kernel.GEMV not in kernels:
        return f"{both}: codes as stored, unpacked by Triton for each product"
    return f"{both}: codes as stored, multiplied by packed kernels (many rows: unpacked)"


def _failed_product(survey: Survey, number: int) -> str | None:
    """Return what went wrong with the product that was tried on a GPU, None if nothing did."""
    tried = {look["gpu"]: look["problem"] for look in survey.get("tried", ())}
    return tried.get(number)


def _gpu_runs(survey: Survey, gpu: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what a GPU can run, and whether that is anything."""
    if not _torch_serves(survey):
        return "nothing: torch cannot use it", False
    capability = _version(gpu["capability"])
    if not _has_code(gpu["capability"], survey["torch_arches"]):
        return "nothing: torch's wheel has no code for it", False
    types = "float16, bfloat16" if capability >= (8, 0) else "float16"
    if "triton" not in survey["packages"]:
        return f"{types}; quantised layers by torch operators, as Triton is missing", True
    if capability >= (9, 0) and capability < (10, 0):
        return f"{types}, packed kernels w3a16 w4a16 w8a16, w8a8, w4a4, KV 16 8 4 2", True
    if capability >= (8, 0):
        return f"{types}, packed kernels w3a16 w4a16 w8a16, KV 16 8 4 2", True
    if capability >= (7, 5):
        return f"{types}, packed weights unpacked by Triton, products by cuBLAS", True
    return f"{types}, packed weights unpacked by torch operators, products by cuBLAS", True


def _torch_serves(survey: Survey) -> bool:
    return survey["torch_cuda"] is not None and survey["torch_sees"] > 0


def _of_versions(survey: Survey) -> list[Finding]:
    found, packages = [], survey["packages"]
    for name, least in _LEAST.items():
        have = packages.get(name)
        wanted = ".".join(map(str, least))
        if have is None and name == "ray":
            found.append(
                _advice(
                    f"{survey['host']}: Ray is not installed, which only jobs over several "
                    "machines need: pip install 'llmpq[run]'"
                )
            )
        elif have is None or _version(have) < least:
            found.append(
                _error(
                    f"{survey['host']}: {name} {have or 'is not installed'}, expected {wanted} or "
                    f"newer: pip install '{name}>={wanted}'"
                )
            )
    for name in ("safetensors", "transformers"):
        if name not in packages:
            found.append(
                _error(f"{survey['host']}: {name} is not installed: pip install 'llmpq[run]'")
            )
    if survey["gpus"] and "triton" not in packages:
        found.append(
            _error(
                f"{survey['host']}: Triton is not installed, which quantised layers on GPUs need: "
                "pip install 'llmpq[gpu]'"
            )
        )
    return found


def _of_torch(survey: Survey) -> list[Finding]:
    """Return why torch cannot use the GPUs that the driver has."""
    host, torch = survey["host"], survey["packages"].get("torch")
    count, seen = len(survey["gpus"]), survey["torch_sees"]
    if not survey["gpus"] or seen >= count:
        return []
    if _torch_serves(survey):
        return [
            _error(
                f"{host}: torch sees {seen} of the driver's {count} GPUs: a card that nvidia-smi "
                "lists cannot be opened; see dmesg for its errors, or leave it out with "
                "CUDA_VISIBLE_DEVICES"
            )
        ]
    if survey["torch_cuda"] is None:
        return [
            _error(
                f"{host}: torch {torch} has no CUDA, its {count} GPUs lie idle: {_install(survey)}"
            )
        ]
    serves = survey["driver_cuda"]
    if serves is not None and _version(serves)[0] < _version(survey["torch_cuda"])[0]:
        driver = survey["gpus"][0]["driver"]
        return [
            _error(
                f"{host}: driver {driver} serves CUDA {serves}, torch {torch} is built for "
                f"{survey['torch_cuda']}: update the driver, or {_install(survey)}"
            )
        ]
    return [
        _error(
            f"{host}: the driver has {count} GPUs, torch sees none: look at CUDA_VISIBLE_DEVICES, "
            "at who may open /dev/nvidia*, and, in a container, at --gpus all"
        )
    ]


def _install(survey: Survey, capability: str | None = None) -> str:
    """Return the command that installs a torch for the node's driver and card."""
    serves = _version(survey["driver_cuda"] or "0.0")
    if capability is not None and _version(capability) < _NEWER_FROM:
        build = _OLD_BUILD
    else:
        build = next((name for needs, name in _BUILDS if serves >= needs), _OLD_BUILD)
    return f"pip install torch --index-url {WHEELS}/{build}"


def _has_code(capability: str, arches: Sequence[str]) -> bool:
    """Whether a wheel's code runs on a card: made for its generation, or compiled when loaded."""
    if not re.fullmatch(r"\d+\.\d+", capability):
        return True  # the driver does not say
    major, minor = _version(capability)[:2]
    for arch in arches:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch)
        if match is None:
            continue
        form, own = match[1], (int(match[2]), int(match[3]))
        if own[0] == major and own[1] <= minor and form == "sm" and not arch.endswith(("a", "f")):
            return True
        if arch.endswith(("a", "f")) and own == (major, minor):
            return True
        if form == "compute" and own <= (major, minor):
            return True
    return False


def _device(gpu: Mapping[str, Any]) -> kernel_table.Device:
    """Return what the table of kernels calls a GPU."""
    major, minor, *_ = (*_version(gpu["capability"]), 0)
    return kernel_table.gpu((major, minor))


def _version(text: str) -> tuple[int, ...]:
    """Return the first numbers of a version: 2.13.0+cpu is (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2]) or (0,)


def _memory(device: Mapping[str, Any]) -> str:
    total, free = device["total_bytes"], device["free_bytes"]
    if total is None:
        return "the host's"
    return f"{format_size(free) if free is not None else '?'} free of {format_size(total)}"


def _error(text: str) -> Finding:
    return Finding(level="error", text=text)


def _advice(text: str) -> Finding:
    return Finding(level="advice", text=text)
