"""Cards as people spell them, and devices as one says them in a line."""

from __future__ import annotations

import math
import re

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.devices.device_list import read_devices
from llmpq.devices.device_spec import (
    canonical_kind,
    device_specs,
    known_kind,
    siblings,
    unknown_card,
)
from llmpq.devices.device_text import CPU_THREADS
from llmpq.devices.this_machine import Host, MachineDevices, parse_gpus

pytestmark = pytest.mark.pure

SPELLINGS = {
    "RTX-4090": "4090;RTX 4090;rtx4090;GeForce RTX 4090;NVIDIA GeForce RTX 4090;4090 24GB",
    "RTX-3060": "GeForce RTX 3060 12GB;3060;3060-12g;RTX3060 12 GB;3060 12",
    "A100-80GB": "A100;A100 80GB;a100-80g;NVIDIA A100-SXM4-80GB;A100 80GB PCIe;A100 SXM;a100-80",
    "A100-40GB": "A100 40GB;NVIDIA A100-PCIE-40GB;a100-sxm4-40gb",
    "T4": "T4;Tesla T4;NVIDIA_Tesla_T4;t4 16gb",
    "GTX-1080-Ti": "1080 Ti;1080ti;GTX 1080 Ti 11GB;NVIDIA GeForce GTX 1080 Ti",
    "RTX-4070-Ti-Super": "4070 Ti Super;4070tis;RTX 4070 Ti SUPER 16GB",
    "RTX-4070-Super": "4070s;RTX 4070 SUPER",
    "RTX-4060-Ti-16GB": "4060 Ti 16GB;RTX 4060 Ti (16 GB);4060ti-16gb",
    "RTX-3080-12GB": "3080 12GB;3080-12g",
    "RTX-3080-10GB": "3080;RTX 3080 10GB",
    "RTX-4090-Laptop": "RTX 4090 Laptop GPU;4090 laptop;NVIDIA GeForce RTX 4090 Laptop GPU;4090m",
    "RTX-4070-Laptop": "4070-mobile;4070 mobile;GeForce RTX 4070 Max-Q / Mobile;4070 notebook",
    "RTX-3080-Laptop-16GB": "RTX 3080 Laptop 16GB",
    "RTX-5070-Ti-Laptop": "NVIDIA GeForce RTX 5070 Ti Laptop GPU;rtx-5070-ti-laptop;5070 Ti Mobile",
    "GB10": "gb10;DGX Spark;dgx-spark;NVIDIA GB10",
    "Strix-Halo": "strix-halo;Strix Halo;Radeon 8060S Graphics;Ryzen AI Max+ 395",
    "Arc-B580": "Arc B580;b580;Intel(R) Arc(TM) B580 Graphics",
    "Arc-Pro-B60": "Arc B60;Intel(R) Arc(TM) Pro B60 Graphics",
    "M3-Ultra": "m3-ultra;M3 Ultra;Apple M3 Ultra",
    "M1": "m1;Apple M1",
    "RX-7900-XTX": "7900 XTX;RX 7900 XTX;AMD Radeon RX 7900 XTX;7900xtx",
    "RTX-A6000": "A6000;RTX A6000;NVIDIA RTX A6000 48GB",
    "RTX-6000-Ada": "RTX 6000 Ada;NVIDIA RTX 6000 Ada Generation;6000 ada",
    "RTX-PRO-6000": "RTX PRO 6000;NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "H100-SXM": "H100;h100 sxm;NVIDIA H100 80GB HBM3;H100-SXM5-80GB",
    "H100-PCIe": "H100 PCIe;NVIDIA H100 PCIe",
    "A10G": "A10G;NVIDIA A10G",
    "V100-16GB": "V100 16GB;Tesla V100-SXM2-16GB",
    "CPU": "cpu;CPU",
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_cards_are_known_by_the_names_people_give_them(kind: str) -> None:
    for spelling in SPELLINGS[kind].split(";"):
        assert canonical_kind(spelling) == kind, spelling


@pytest.mark.parametrize(
    "spelling",
    [
        "RTX 5095 Laptop GPU",
        "RTX 5095 Mobile",
        "RX 7900M",
        "4090D",
        "M3 Ultra Laptop",
        "RTX 4090 48GB",
        "RTX 6000",
        "3060 8GB",
        "4095",
        "",
        "RTX",
    ],
)
def test_another_card_is_not_taken_for_a_known_one(spelling: str) -> None:
    assert known_kind(spelling) is None


def test_the_cards_people_have_are_in_the_table() -> None:
    asked = "1080ti,2080ti,3060 12gb,3070,3080,3090,4060ti,4070,4080,4090,5070,5080,5090,7900xtx"
    for name in asked.split(","):
        spec = device_specs()[canonical_kind(name)]
        assert 30 < spec.mem_gbps < 2000 and spec.fp16_tflops > 5
        assert spec.fp32_tflops and spec.sms and spec.source


def test_rates_of_a_generation_follow_from_its_cores_and_clock() -> None:
    """A card's rates are fixed multiples of its fp32 rate, its generation's: a typo breaks one."""
    ratios = {"8.6": (2, 8, None, 16), "8.9": (2, 8, 4, 16), "12.0": (2, 8, 4, None)}
    for kind, spec in device_specs().items():
        if not kind.startswith("RTX-") or not kind[4:8].isdecimal() or spec.capability is None:
            continue
        if spec.capability not in ratios or kind == "RTX-6000-Ada":
            continue
        assert spec.fp32_tflops is not None
        rates = (spec.fp16_tflops, spec.int8_tops, spec.fp8_tflops, spec.int4_tops)
        for rate, ratio in zip(rates, ratios[spec.capability], strict=True):
            assert (rate is None) == (ratio is None), kind
            if rate is not None and ratio is not None:
                assert rate / spec.fp32_tflops == pytest.approx(ratio, rel=0.01), kind


def test_memory_tells_cards_of_one_name_apart() -> None:
    name = "NVIDIA GeForce RTX 4060 Ti"
    assert canonical_kind(name, 16380 * 2**20) == "RTX-4060-Ti-16GB"
    assert canonical_kind(name, 8188 * 2**20) == "RTX-4060-Ti-8GB"
    assert siblings("RTX-4060-Ti-8GB") == ("RTX-4060-Ti-16GB",)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("4090,3090:2,cpu", "RTX-4090-0 RTX-3090-0 RTX-3090-1 CPU-0"),
        ("RTX 4090, 2 x RTX 3090", "RTX-4090-0 RTX-3090-0 RTX-3090-1"),
        ("3090x2", "RTX-3090-0 RTX-3090-1"),
        ("2x3090", "RTX-3090-0 RTX-3090-1"),
        ("rtx4090*2", "RTX-4090-0 RTX-4090-1"),
        ("4090 3090:2 cpu", "RTX-4090-0 RTX-3090-0 RTX-3090-1 CPU-0"),
        ("4090 + 2x 3090", "RTX-4090-0 RTX-3090-0 RTX-3090-1"),
        ("4090;3090:2", "RTX-4090-0 RTX-3090-0 RTX-3090-1"),
        ("a100 80gb:2 & RTX 3060 12GB and cpu", "A100-80GB-0 A100-80GB-1 RTX-3060-0 CPU-0"),
        ("RTX 4090 A100 80GB", "RTX-4090-0 A100-80GB-0"),
        ("mi300x:2", "MI300X-0 MI300X-1"),
        ("GeForce RTX 3060 12GB,Tesla T4", "RTX-3060-0 T4-0"),
    ],
)
def test_a_line_is_read_as_devices_of_one_machine(text: str, names: str) -> None:
    cluster = read_devices(text).cluster
    assert [device.name for device in cluster.devices] == names.split()
    assert {device.node for device in cluster.devices} == {"machine"}, "no other is here"


def test_a_card_is_described_inline() -> None:
    devices = read_devices("arc b770=456GB/s+12GB+98 TFLOPS:2,4090=48GB").cluster.devices
    assert [d.name for d in devices] == ["arc-b770-0", "arc-b770-1", "RTX-4090-0"]
    spec = devices[0].spec
    assert (spec.memory, spec.mem_gbps, spec.fp16_tflops) == (12 * 10**9, 456, 98)
    assert spec.context == 2**29 and not spec.is_cpu
    assert devices[2].memory_bytes == 48 * 10**9


def test_a_card_of_the_table_is_described_anew() -> None:
    found = read_devices("gb10=119GB+273GB/s+100TFLOPS,GB10,4090=900GB/s")
    mine, known, slower = found.cluster.devices
    assert (mine.kind, known.kind, slower.kind) == ("gb10-as-described", "GB10", "4090")
    assert (mine.memory_bytes, mine.spec.fp16_tflops) == (119 * 10**9, 100)
    assert (slower.spec.mem_gbps, slower.spec.fp16_tflops) == (900, 165.2), "the rest as the table"
    assert mine.spec.capability == known.spec.capability
    assert any("gb10-as-described is as described" in line for line in found.assumptions)


def test_the_hosts_cores_have_threads_and_memory() -> None:
    plain, stated = (
        read_devices(text).cluster.devices[0] for text in ("cpu", "cpu=64GB+80GB/s+16threads")
    )
    assert plain.threads == CPU_THREADS and plain.spec.is_cpu
    assert (stated.threads, stated.memory_bytes, stated.spec.mem_gbps) == (16, 64 * 10**9, 80)
    assert stated.spec.is_cpu


def test_what_is_assumed_is_said() -> None:
    assert read_devices("4090").assumptions == ()
    assert read_devices("4090:2").assumptions == (
        "one machine, 64 Gb/s and 20 us between any two devices (as PCIe 4.0 x4); describe other "
        "links or several machines in a cluster YAML",
    )
    assert read_devices("a100").assumptions == ("a100 is the A100-80GB; the other is A100-40GB",)
    assert read_devices("a100 80gb").assumptions == ()
    assert read_devices("cpu=64GB").assumptions == (
        "cpu has 8 threads, 20 GB/s; or say cpu=64GB+60GB/s+16threads",
    )


@pytest.mark.parametrize(
    ("spelling", "maker", "first"),
    [
        ("rtx-6090", "NVIDIA", None),
        ("rx 6800 xt", "AMD", "RX-7800-XT"),
        ("arc b770", "Intel", "Arc-B570"),
        ("m5-max", "Apple", None),
        ("rtx 5070 super", "NVIDIA", "RTX-5070"),
        ("b300", None, "B200"),
    ],
)
def test_near_names_are_of_the_same_sort(spelling: str, maker: str, first: str | None) -> None:
    message = unknown_card(spelling)
    near = re.search(r"nearest: (.*) \(all", message)
    assert near is not None, message
    kinds = near[1].split(", ")
    assert first in (None, kinds[0])
    assert maker is None or {device_specs()[kind].maker for kind in kinds} == {maker}


SOLD = re.compile(r"rule, (\d+) GiB( with ECC)?")


def test_cards_without_a_source_have_the_memory_of_the_stated_rule() -> None:
    ruled = 0
    for kind, spec in device_specs().items():
        if spec.is_cpu:
            continue
        assert spec.memory_source, kind
        sold = SOLD.fullmatch(spec.memory_source)
        if sold is not None:
            ruled += 1
            left = float(sold[1]) * (15 / 16 if sold[2] else 1)
            assert spec.memory / 2**30 == pytest.approx(0.988 * left - 0.25, abs=0.006), kind
    assert ruled >= 20


def test_memory_is_what_programs_see_on_linux() -> None:
    seen = {"3090": 23.68, "4090": 23.64, "3080": 9.78, "4060": 7.75, "5090": 31.37, "T4": 14.56}
    seen |= {"V100 16GB": 15.77, "A100": 79.25, "A6000": 47.53, "L4": 22.03, "GB10": 119.63}
    for name, gib in seen.items():
        spec = device_specs()[canonical_kind(name)]
        assert spec.memory / 2**30 == pytest.approx(gib, abs=0.005), name
    for kind, spec in device_specs().items():
        sold = re.search(r"-(\d+)GB", kind)
        assert sold is None or spec.memory < int(sold[1]) * 2**30, kind


def test_a_card_that_may_drive_a_screen_leaves_it_half_a_gib() -> None:
    mine, server = read_devices("4090,a6000").cluster.devices
    assert (mine.reserve_bytes, server.reserve_bytes) == (2**29, 0)
    (mac,) = read_devices("m4-max=128GB").cluster.devices
    assert mac.limit_bytes == pytest.approx(96 * 2**30), "what macOS gives a GPU"


@pytest.mark.parametrize(
    ("memory", "total"), [("48GB", 48 * 2**30), ("48GiB", 48 * 2**30), ("40GB", 40 * 10**9)]
)
def test_a_machine_has_the_gib_that_it_is_sold_with(memory: str, total: int) -> None:
    (mac,) = read_devices(f"m4-pro={memory}").cluster.devices
    assert mac.memory_bytes == total
    node = {"name": "mini", "devices": [{"kind": "M4-Pro", "memory": memory}]}
    (named,) = Cluster.parse_data({"name": "lab", "nodes": [node]}, where="test").devices
    assert named.memory_bytes == total


MACHINE = MachineDevices(
    gpus=tuple(parse_gpus("0, GPU-a, NVIDIA GeForce RTX 4090, 24564, 24000, 570.1, 8.9")),
    host=Host(reported="a CPU", cores=8, threads=6, total_bytes=2**36, free_bytes=2**35),
)


@pytest.mark.parametrize(
    ("text", "node", "cpus"),
    [
        ("cpu", "here", [(6, 2**36, 2**35)]),
        ("4090,cpu", "here", [(6, 2**36, 2**35)]),
        ("cpu:2", "here", [(3, 2**35, 2**34)] * 2),
        ("cpu,cpu", "here", [(3, 2**35, 2**34)] * 2),
        ("cpu,4090,cpu:2", "here", [(2, 2**36 // 3, 2**36 // 3 - 2**35 // 3)] * 3),
        ("cpu=16GiB,cpu", "here", [(3, 2**34, 2**34), (3, 3 * 2**34, 2**34)]),
        ("cpu=2threads,cpu", "here", [(2, 2**35, 2**34), (4, 2**35, 2**34)]),
        ("cpu=60GiB,cpu", "here", [(3, 60 * 2**30, 60 * 2**30), (3, 2**32, 2**20)]),
        ("4090,cpu=16GiB", "here", [(6, 2**34, 2**34)]),
        ("cpu=4threads", "here", [(4, 2**36, 2**35)]),
        ("4090", "here", []),
        ("4090:2,cpu", "machine", [(CPU_THREADS, 2**34, 2**34)]),
        ("3090,cpu", "machine", [(CPU_THREADS, 2**34, 2**34)]),
        ("cpu=128GiB", "machine", [(CPU_THREADS, 2**37, 2**37)]),
        ("cpu=64threads", "machine", [(64, 2**34, 2**34)]),
    ],
)
def test_devices_that_this_machine_has_are_its_own(text, node, cpus) -> None:
    found = read_devices(text, machine=MACHINE)
    assert {device.node for device in found.cluster.devices} == {node}
    own = [d for d in found.cluster.devices if d.spec.is_cpu]
    assert [(d.threads, d.memory_bytes, d.limit_bytes) for d in own] == cpus
    said = [line for line in found.assumptions if line.startswith(("cpu", "each"))]
    assert bool(said) == bool(cpus)
    assert all(("this machine" in line) == (node == "here") for line in said)


def test_cards_that_are_here_have_the_memory_that_others_leave_now() -> None:
    gpus = parse_gpus(
        "0, GPU-a, NVIDIA GeForce RTX 4090, 24564, 22000, 570.1, 8.9\n"
        "1, GPU-b, NVIDIA GeForce RTX 3090, 24576, 24500, 570.1, 8.6\n"
    )
    machine = MachineDevices(gpus=tuple(gpus), host=MACHINE.host)
    found = read_devices("4090,3090", machine=machine)
    held = {d.kind: d.reserve_bytes for d in found.cluster.devices}
    assert held["RTX-4090"] >= 2564 * 2**20 > held["RTX-3090"] >= 76 * 2**20
    assert found.cluster.name == "RTX-4090,RTX-3090"
    said = [line for line in found.assumptions if "in use now" in line]
    assert len(said) == 2 and "RTX-4090 (GPU 0)" in said[0]
    elsewhere = read_devices("4090:2", machine=machine).cluster.devices
    assert {d.reserve_bytes for d in elsewhere} == {2**29}, "for a screen: they are not here"
    stated = read_devices("4090=48GB", machine=machine).cluster.devices
    assert stated[0].memory_bytes == 48 * 10**9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--devices is empty, expected devices such as 4090,3090:2,cpu"),
        (",,", "--devices is empty, expected devices such as 4090,3090:2,cpu"),
        ("4090:x", "--devices 4090:x: expected NAME:COUNT, such as 3090:2, got 'x' for a count"),
        ("4090:0", "--devices 4090:0: expected 1 to 1,000 devices, got 0"),
        ("1000x4090,4090", "--devices: got 1,001 devices, expected at most 1,000"),
        (
            "foo=24GB",
            "--devices foo=24GB: no bandwidth and no 16-bit rate; expected foo=...GB+...GB/s+..."
            "TFLOPS, its memory, bandwidth and dense 16-bit rate",
        ),
        (
            "4090=8threads",
            "--devices 4090=8threads: '4090' is the RTX-4090, a card, which has no threads",
        ),
        (
            "m3 ultra",
            "--devices m3 ultra: a machine with M3-Ultra has 96, 256 or 512 GB of memory: say "
            "which, such as m3 ultra=512GB",
        ),
        (
            "gb300",
            "--devices gb300: unknown device 'gb300': nearest: GB10 (all: llmpq-algo devices "
            "--known); describe it as gb300=...GB+...GB/s+...TFLOPS, its memory, bandwidth and "
            "dense 16-bit rate",
        ),
        (
            "4090=24",
            "--devices 4090=24: got '24', expected memory, bandwidth or a rate with its unit: "
            "24GB, 936GB/s, 71TFLOPS (of a cpu also 16threads)",
        ),
        (
            "RTX 3060 8GB",
            "--devices RTX 3060 8GB: unknown device 'RTX 3060 8GB': the RTX-3060 of the table has "
            "11.6 GiB; describe it as rtx-3060-8gb=...GB+...GB/s+...TFLOPS, its memory, bandwidth "
            "and dense 16-bit rate",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_devices(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "4090=" + "9" * 400 + "GB",
        "4090:" + "9" * 5000,
        "foo=1GB+1GB/s+" + "9" * 400 + "TFLOPS",
        "cpu=99999999threads",
        "x" * 10_000,
        "4090 " * 500 + "no such card",
        "=24GB+1GB/s+1TFLOPS",
        "cpu=936Gb/s",
        "4090|3090",
    ],
)
def test_absurd_texts_end_in_a_short_sentence(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_devices(text)
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["gpu", "cuda:0", "GPU0", "nvidia", "auto", "4090,gpus", "all:2"])
def test_the_cards_that_there_are_need_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="names no card; leave --devices out for what this"):
        read_devices(text)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("4090 3090", ["RTX-4090", "RTX-3090"]),
        ("3060 4090 3090", ["RTX-3060", "RTX-4090", "RTX-3090"]),
        ("1080 1080 ti", ["GTX-1080", "GTX-1080-Ti"]),
        ("9070 2x 8000", ["RX-9070", "Quadro-RTX-8000", "Quadro-RTX-8000"]),
        ("2 3090", ["RTX-3090", "RTX-3090"]),
    ],
)
def test_a_number_that_is_a_card_is_no_count(text: str, kinds: list[str]) -> None:
    assert [device.kind for device in read_devices(text).cluster.devices] == kinds


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("3080=12GB", "RTX-3080-12GB", ""),
        ("rtx 4060 ti=16GB", "RTX-4060-Ti-16GB", ""),
        ("a100=40GB", "A100-40GB", ""),
        ("3080=20GB", "RTX-3080-10GB", "3080 with 18.6 GiB is the RTX-3080-10GB with other memory"),
        ("4090=48GB", "RTX-4090", "4090 with 44.7 GiB: the table's has 23.6 GiB"),
        ("3090=22GB", "RTX-3090", ""),
        ("3090=24GB", "RTX-3090", ""),
        ("3090=24GiB", "RTX-3090", ""),
        ("v100=32GB", "V100-32GB", ""),
    ],
)
def test_a_stated_memory_says_which_card_of_a_name(text: str, kind: str, said: str) -> None:
    """The size that a card is sold by is what CUDA reports of it; another size is as it is said."""
    found = read_devices(text)
    (device,) = found.cluster.devices
    stated = int(re.sub(r"\D", "", text.partition("=")[2]))
    is_sold_so = stated == math.ceil(device_specs()[kind].memory / 2**30)
    memory = device_specs()[kind].memory if is_sold_so else stated * 10**9
    assert (device.kind, device.memory_bytes) == (kind, memory)
    assert list(found.assumptions) == ([said] if said else [])


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("4090:24", "RTX-4090", 24),
        ("v100:16", "V100-32GB", 16),
        ("3060 : 12", "RTX-3060", 12),
        ("7900xtx*24", "RX-7900-XTX", 24),
        ("a100 80gb:8", "A100-80GB", 8),
        ("a100 80", "A100-80GB", 1),
        ("4060ti-16gb", "RTX-4060-Ti-16GB", 1),
    ],
)
def test_a_number_behind_a_colon_is_a_count_also_where_a_card_has_as_many_gb(
    text: str, name: str, count: int
) -> None:
    found = read_devices(text)
    assert [device.kind for device in found.cluster.devices] == [name] * count
    said = [line for line in found.assumptions if f"is {count} cards; one of" in line]
    assert bool(said) is (":" in text and "gb" not in text), "as many GB are offered, too"
