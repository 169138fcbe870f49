"""Cards as people spell them, and devices as one says them in a line."""

from __future__ import annotations

import pytest

from llmpq.devices.device_list import CPU_THREADS, read_devices
from llmpq.devices.device_spec import canonical_kind, device_specs, known_kind, siblings

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
    ["RTX 4090 Laptop GPU", "4090D", "RTX 4090 48GB", "RTX 6000", "3060 8GB", "4095", "", "RTX"],
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
        ("RTX 4090 A100 80GB", "RTX-4090-0 A100-80GB-0"),
        ("mi300x:2", "MI300X-0 MI300X-1"),
        ("GeForce RTX 3060 12GB,Tesla T4", "RTX-3060-0 T4-0"),
    ],
)
def test_a_line_is_read_as_devices_of_one_machine(text: str, names: str) -> None:
    cluster = read_devices(text).cluster
    assert [device.name for device in cluster.devices] == names.split()
    assert {device.node for device in cluster.devices} == {"here"}


def test_a_card_is_described_inline() -> None:
    devices = read_devices("arc b580=456GB/s+12GB+98 TFLOPS:2,4090=48GB").cluster.devices
    assert [d.name for d in devices] == ["arc-b580-0", "arc-b580-1", "RTX-4090-0"]
    spec = devices[0].spec
    assert (spec.memory, spec.mem_gbps, spec.fp16_tflops) == (12 * 10**9, 456, 98)
    assert spec.context == 2**29 and not spec.is_cpu
    assert devices[2].memory_bytes == 48 * 10**9


def test_the_hosts_cores_have_threads_and_memory() -> None:
    plain, told = (
        read_devices(text).cluster.devices[0] for text in ("cpu", "cpu=64GB+80GB/s+16threads")
    )
    assert plain.threads == CPU_THREADS and plain.spec.is_cpu
    assert (told.threads, told.memory_bytes, told.spec.mem_gbps) == (16, 64 * 10**9, 80)
    assert told.spec.is_cpu


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
    ("text", "message"),
    [
        ("", "--devices is empty, expected devices such as 4090,3090:2,cpu"),
        (",,", "--devices is empty, expected devices such as 4090,3090:2,cpu"),
        ("4090:x", "--devices 4090:x: expected NAME:COUNT, such as 3090:2, got 'x' for a count"),
        ("4090:0", "--devices 4090:0: expected 1 to 1,000 devices, got 0"),
        ("1000x4090,4090", "--devices: got 1,001 devices, expected at most 1,000"),
        (
            "foo=24GB",
            "--devices foo=24GB: no bandwidth (936GB/s) and no 16-bit rate (71TFLOPS); expected "
            "NAME=MEMORY+BANDWIDTH+RATE, such as foo=24GB+936GB/s+71TFLOPS",
        ),
        (
            "4090=900GB/s",
            "--devices 4090=900GB/s: '4090' is the RTX-4090 of the table, of which only the memory "
            "can be changed, such as 4090=48GB; give a card of your own another name",
        ),
        (
            "4090=24",
            "--devices 4090=24: got '24', expected memory, bandwidth or a rate with its unit: "
            "24GB, 936GB/s, 71TFLOPS (of a cpu also 16threads)",
        ),
        (
            "RTX 3060 8GB",
            "--devices RTX 3060 8GB: unknown device 'RTX 3060 8GB': the RTX-3060 of the table has "
            "12.0 GiB; describe a card that is not in the table as NAME=MEMORY+BANDWIDTH+RATE, "
            "such as rtx-3060-8gb=24GB+936GB/s+71TFLOPS",
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
