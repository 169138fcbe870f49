"""How long a product takes in a configuration: a model of the machine, fitted once on one card.

    programs, spread over the multiprocessors, R of them resident on each (registers, shared memory)
        latency   waves of resident programs * (start + k-groups * step)
        issue     k-groups of the fullest multiprocessor * share
        memory    bytes / bandwidth;  L2: what programs read of x / the L2's rate
    time = launch + the largest of these (smoothly) + what shared tiles cost

`step_times.json` holds, for every form of the kernels, start, step and share in microseconds on
the reference machine (`machine.REFERENCE`) and the registers of a thread. `benchmarks/gemm_model.py
fit` writes it from timings of every configuration (`search`) and says what the choice loses
against the best of them. Entries with `weights` were fitted to that form of weights
(d2231297:benchmarks/fit_weights.py): bfloat16 with zeros takes more registers and instructions than
float16. On another machine steps take as many clocks, and as much longer as its tensor cores need
for their products.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.ranking.config import Config, piece_rows
from llmpq.kernels.gemm.ranking.machine import REFERENCE, Machine
from llmpq.kernels.gemm.ranking.wgmma_plan import schedule, tile_rows, tiles_of

SHARPNESS = 6.0
"""Of the largest of the bounds: near each other they add up a little."""
THREE_BIT_STEPS = 1.15
"""Of 4 bits': planes of 2 and 1 bits take more instructions."""
PAST_ROWS = 0.4
"""Of a step, were all rows past the end."""
THREE_BIT_WGMMA = 1.04
"""... of `wgmma_gemm_kernel`, whose tensor cores set the pace: on an H200 layers of Llama-3.1-8B
take as long as of 4 bits in the median, 2,304 to 16,384 tokens."""
EIGHT_BIT_ZEROS = 1.06
"""Of a step of `wgmma_gemm_kernel`, 8 bits in bfloat16 with zeros beside float16 without."""
CUBLAS_RATE = 0.78
"""Of a multiprocessor's tensor cores, by cuBLAS's largest tiles."""
CUBLAS_TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 192, 0.97),
    (192, 128, 0.97),
    (128, 128, 0.87),
    (64, 256, 0.85),
    (64, 192, 0.8),
    (64, 128, 0.72),
)
"""Rows of x, rows of w, rate beside the largest's; K is shared by up to four of a tile."""
CUBLAS_SPLIT_US = 2.0
CUBLAS_SUMS_A_S = 6e12
"""Bytes of float32 shares a second."""
L2_PIECE = 0.6
"""Of the L2: a piece of w that is at most as large is not written to memory before it is read."""
UNPACKED_A_S = 2.4e12
"""Weights that are made 16-bit numbers in a second at most."""
ROWS_RATE = 0.773
"""Of a multiprocessor's tensor cores at the card's clock, by the products of `wgmma_rows`."""
UNPACK_CLOCKS = {3: 465, 4: 465, 8: 540}
"""Of 64 rows of a k-group."""
ROWS_STEP_CLOCKS, ROWS_TILE_CLOCKS, ROWS_SHARED_CLOCKS = 24, 390, 20_700
"""More of a k-group, of a tile, and where K is shared out."""
ROWS_SHARES_A_CLOCK = 120
"""Bytes of shares, written and read."""
ROWS_SPLIT_CLOCKS = 4500
"""... by the programs of a cluster."""
CLUSTERS = {2: 66 / 66, 3: 36 / 44, 4: 30 / 33}
"""Clusters of so many programs that run at once, of what the multiprocessors would hold: 16 or 18
of these lie together (H200: 36 of three and 30 of four run at once; 40 and 32 take twice)."""
ROWS_LAUNCH_US = 0.8
"""These are fitted to 1,000 times of tiles (H200, eight shapes, 64 to 1,500 rows, 4 and 8 bits):
what they choose takes 1 % longer than the best of these tiles."""
PIECE_US = 3.0
"""Of a piece's two launches. These constants are fitted to what products of seven shapes took on an
H200, 333 to 4,096 rows of 8 bits: ours over pieces, over w as one, and cuBLAS's over ours."""
RING_CLOCKS = 165
"""Of 16 rows of a k-group of 4 bits, by one warp of a quarter of a multiprocessor."""
RING_LAUNCH_US, RING_X_A_S = 3.2, 33e9
"""Of a product, and bytes of x a second that a program loads: from 60 times on an H200 (1, 4 and 8
rows, 20 shapes), of which it errs by 5 % in the median."""
X_IN_L2 = 0.25
"""Of the L2: where x is larger, tiles cut at other k-groups than their neighbours read it again."""


@dataclass(frozen=True)
class Product:
    """What is multiplied: y [rows, n] = x [rows, k] w^T, w of `bits`."""

    bits: int
    n: int
    k: int
    rows: int
    form: str = "fp16"
    """dtype and zeros, as in `choice.form_name`."""

    @property
    def groups(self) -> int:
        """K in k-groups."""
        return -(-self.k // GROUP)

    @property
    def moved_bytes(self) -> float:
        """Words and scales once, x and y once."""
        words = self.n * self.k * self.bits / 8 + 2 * self.n * self.groups
        return words + 2 * self.rows * (self.k + self.n)


@dataclass(frozen=True)
class StepTime:
    """Of one form of a kernel, in microseconds on the reference machine."""

    start_us: float
    step_us: float
    share_us: float
    registers: dict[str, int]
    """Of a thread, by the form of the weight."""

    def of(self, form: str) -> int:
        """Return the registers of a form of weights; the most known for one that is not."""
        return self.registers.get(form) or max(self.registers.values(), default=128)


@dataclass(frozen=True)
class Work:
    """What a configuration makes of a product, in counts."""

    steps: int
    """k-groups of a program, one after the other."""
    turns: float
    """Starts of a program or its tiles on the fullest multiprocessor, one after the other."""
    issued: int
    """k-groups of the fullest multiprocessor."""
    l2_bytes: float
    again_bytes: float = 0.0
    """Of x, read again from memory."""
    pieces: float = 0.0
    """gluon: pieces of a program's run of shared tiles."""
    sharers: float = 0.0
    """gluon: programs that share a tile."""


def form_key(config: Config, bits: int) -> str:
    """Return the name of a configuration's form in `step_times.json`."""
    if config.kernel == "gemv":
        return f"gemv w{bits} {config.warps} warps, {config.depth} ahead"
    if config.kernel == "wgmma_gemm":
        name = f"wgmma_gemm w{bits} {config.warpgroups}x{64 * config.blocks}x{config.bm} "
        name += f"{config.stages} stages" + (", asker" if config.asker else "")
        return name + (f", {config.registers} registers" if config.registers else "")
    name = f"splitk_gemm w{bits} {config.warps}x{BLOCK_ROWS * config.blocks}x{config.bm} "
    name += f"{config.depth} ahead" if config.stages == 1 else f"{config.stages} stages"
    return name + (f", {config.registers} registers" if config.registers else "")


def step_time(config: Config, bits: int, weights: str | None = None) -> StepTime | None:
    """Return what was fitted of a configuration's form; None if nothing was.

    `weights`: their form, as in `choice.form_name`; its own timings come before float16's.
    """
    key, table = form_key(config, 4 if bits == 3 else bits), _table()[1]
    found = table.get((key, weights)) or table.get((key, None))
    wgmma = config.kernel == "wgmma_gemm"
    if found is None or not (bits == 3 or (bits == 8 and wgmma and weights == "bf16 zeros")):
        return found
    slower = EIGHT_BIT_ZEROS if bits == 8 else THREE_BIT_WGMMA if wgmma else THREE_BIT_STEPS
    return StepTime(
        found.start_us, found.step_us * slower, found.share_us * slower, found.registers
    )


def resident(config: Config, product: Product, machine: Machine, registers: int) -> int:
    """Return the programs of a configuration that fit a multiprocessor; 0: not even one."""
    shared = shared_estimate(config, product.bits, machine)
    if shared > machine.shared_block:
        return 0
    by_registers = machine.registers // (32 * config.warps * (-(-registers // 8) * 8))
    return max(1, min(by_registers, machine.shared_all // (shared + 1024), 64 // config.warps))


def shared_estimate(config: Config, bits: int, machine: Machine) -> int:
    """Return an upper bound of a Triton form's shared memory: stages or operands, or its sums.

    Other than Hopper's, tensor cores take w from where a warp's lanes have exchanged it.
    """
    if config.kernel == "gemv":
        return 1024 * config.warps
    x = config.bm * GROUP * 2
    rows = BLOCK_ROWS * config.blocks * config.warps
    exchanged = 0 if machine.capability == (9, 0) else rows * GROUP * 2
    if config.stages == 1:
        loop = x * config.depth + exchanged
    else:
        loop = config.stages * (rows * GROUP * bits // 8 + 4 * rows + x) + exchanged
    return max(loop, 4 * rows * config.bm) + 2048


def work(config: Config, product: Product, machine: Machine, residents: int) -> Work:
    """Count what a configuration makes of a product."""
    groups, rows = product.groups, product.rows
    if config.kernel == "wgmma_gemm":
        return _gluon_work(config, product, machine)
    if config.kernel == "gemv":
        programs = -(-product.n // (BLOCK_ROWS * config.blocks))
        steps = -(-groups // config.warps)
        l2_bytes = float(programs * product.k * 2 * 8)
    else:
        tile = BLOCK_ROWS * config.blocks * config.warps
        programs = -(-rows // config.bm) * -(-product.n // tile) * config.split
        depth = config.depth if config.stages == 1 and groups % config.depth == 0 else 1
        steps = -(-(groups // depth) // config.split) * depth
        l2_bytes = float(programs * steps * config.bm * 2 * GROUP)
    fullest = -(-programs // machine.multiprocessors)
    return Work(
        steps=steps,
        turns=-(-fullest // residents),
        issued=fullest * steps,
        l2_bytes=l2_bytes,
    )


def _gluon_work(config: Config, product: Product, machine: Machine) -> Work:
    tiles, groups = tiles_of(config, product.n, product.rows), product.groups
    programs, whole = schedule(config, tiles, groups, machine.multiprocessors)
    rest, waves = tiles - whole, -(-whole // programs)
    run = -(-rest * groups // programs)
    pieces = 0.0
    if rest:
        aligned = (rest * groups) % programs == 0 and programs % rest == 0
        pieces = run / groups + (0 if aligned else 1)
    steps = waves * groups + run
    large = 2 * product.rows * product.k > X_IN_L2 * machine.l2_bytes
    x_bytes = config.bm * 2 * GROUP * programs
    return Work(
        steps=steps,
        turns=waves + pieces,
        issued=steps,
        l2_bytes=float(x_bytes * steps),
        again_bytes=float(x_bytes * run) if large else 0.0,
        pieces=pieces,
        sharers=programs / rest if rest else 0.0,
    )


def past_the_end(config: Config, rows: int) -> float:
    """Return what a step of `wgmma_gemm_kernel` takes longer for rows that TMA fills with zeros.

    Of one tile with 96 rows of 128: up to a fifth in two warpgroups, nothing in three (H200).
    """
    if config.kernel != "wgmma_gemm" or config.warpgroups > 2 or rows >= config.bm:
        return 1.0
    return 1 + PAST_ROWS * (1 - rows / config.bm)


def expected_us(config: Config, product: Product, machine: Machine) -> float:
    """Return the microseconds that the model expects; infinite where a form does not fit."""
    if config.piece_mib:
        return pieces_us(config, product, machine)
    if config.kernel == "dequantize":
        return dense_us(product, machine)
    if config.kernel == "wgmma_rows":
        return rows_us(config, product, machine)
    if config.kernel == "ring_gemv":
        return ring_us(config, product, machine)
    time = step_time(config, product.bits, product.form)
    if time is None:
        return math.inf
    residents = 1
    if config.kernel != "wgmma_gemm":
        residents = resident(config, product, machine, time.of(product.form))
        if residents == 0:
            return math.inf
    made = work(config, product, machine, residents)
    return bounds_us(config, product, machine, time, made)


def bounds_us(
    config: Config, product: Product, machine: Machine, time: StepTime, made: Work
) -> float:
    """Return the time of counted work."""
    c = _table()[0]
    clock = REFERENCE.clock_hz / machine.clock_hz
    slower_us = _slower_us(config, machine)
    step_us, share_us = time.step_us * clock + slower_us, time.share_us * clock + slower_us
    sharing_us = 0.0
    if config.kernel == "wgmma_gemm":
        step_us *= past_the_end(config, product.rows)
        issue_us = made.issued * step_us + made.turns * time.start_us * clock
        latency_us = 0.0
        if made.pieces:
            one = tile_rows(config) * config.bm * 4
            sharing_us = c["cut_us"] + made.pieces * one / (c["share_bytes_us"] * 1e6)
            sharing_us += c["sharer_us"] * max(0.0, made.sharers - 1) * one / 65536
            sharing_us *= clock
        sharing_us += made.again_bytes / (machine.bandwidth * c["again_rate"]) * 1e6
        launch_us = c["wgmma_launch_us"]
        read = c["wgmma_read"]
    else:
        more = 1 + c["gemv_more"] * (product.rows - 1) if config.kernel == "gemv" else 1.0
        latency_us = made.turns * (time.start_us * clock + made.steps * step_us * more)
        issue_us = made.issued * share_us * more
        sharing_us = c["split_us"] if config.split > 1 else 0.0
        launch_us, read = c["gemv_launch_us" if config.kernel == "gemv" else "launch_us"], 1.0
    memory_us = product.moved_bytes / (machine.bandwidth * read) * 1e6
    scale = machine.multiprocessors * machine.clock_hz
    l2_rate = c["wgmma_l2" if config.kernel == "wgmma_gemm" else "l2"]
    scale /= REFERENCE.multiprocessors * REFERENCE.clock_hz
    parts = (latency_us, issue_us, memory_us, 1e6 * made.l2_bytes / (l2_rate * scale))
    return launch_us + sum(p**SHARPNESS for p in parts) ** (1 / SHARPNESS) + sharing_us


def _slower_us(config: Config, machine: Machine) -> float:
    """Return what a k-group's products take longer than on the reference machine."""
    if config.kernel == "gemv":
        flops = 2 * BLOCK_ROWS * config.blocks * config.warps * 8 * GROUP
    elif config.kernel == "wgmma_gemm":
        flops = 2 * tile_rows(config) * config.bm * GROUP
    else:
        flops = 2 * BLOCK_ROWS * config.blocks * config.warps * config.bm * GROUP
    here = flops / (machine.flops_a_clock * machine.clock_hz)
    there = flops / (REFERENCE.flops_a_clock * REFERENCE.clock_hz)
    return max(0.0, here - there) * 1e6


def dense_us(product: Product, machine: Machine) -> float:
    """Return the time of dequantising, then cuBLAS: the copy is written and read once."""
    copy = 2 * product.n * product.k
    rate = machine.flops_a_clock * machine.clock_hz * machine.multiprocessors * 0.75
    flops = 2 * product.rows * product.n * product.k
    reads = max(flops / rate, (copy + 2 * product.rows * product.k) / machine.bandwidth)
    return 6.0 + 1e6 * ((product.moved_bytes + copy) / machine.bandwidth + reads)


def pieces_us(config: Config, product: Product, machine: Machine) -> float:
    """Return the time of making a piece of w and multiplying by it, piece after piece."""
    n, k, rows = product.n, product.k, product.rows
    each = piece_rows(config.piece_mib, n, k) or n
    found = 0.0
    for first in range(0, n, each):
        own = min(each, n - first)
        words = own * (k * product.bits / 8 + 4 * product.groups)
        kept = 0 if 2 * own * k <= L2_PIECE * machine.l2_bytes else 2 * own * k
        made_us = 1e6 * (words + kept) / machine.bandwidth
        made_us = max(made_us, 1e6 * own * k / UNPACKED_A_S)
        found += PIECE_US + made_us + cublas_us(rows, own, k, machine)
    return found


def clusters_at_once(programs: int, machine: Machine) -> int:
    """Return how many clusters of so many programs run at once."""
    return int(machine.multiprocessors // programs * CLUSTERS[programs])


def rows_us(config: Config, product: Product, machine: Machine) -> float:
    """Return the time of tiles of any multiple of 8 rows: of tensor cores, or of unpacking."""
    tiles, groups = tiles_of(config, product.n, product.rows), product.groups
    programs, whole = schedule(config, tiles, groups, machine.multiprocessors)
    rest = tiles - whole
    products = 2 * tile_rows(config) * config.bm * GROUP / (machine.flops_a_clock * ROWS_RATE)
    unpacking = UNPACK_CLOCKS[product.bits] * config.warpgroups
    step = (products**4 + unpacking**4) ** 0.25 + ROWS_STEP_CLOCKS
    clocks = -(-whole // programs) * (groups * step + ROWS_TILE_CLOCKS)
    if config.split > 1:
        at_once = clusters_at_once(config.split, machine)
        each = -(-groups // config.split) * step + ROWS_TILE_CLOCKS + ROWS_SPLIT_CLOCKS
        clocks = -(-tiles // at_once) * each
    if rest:
        shares = 8 * tile_rows(config) * config.bm * max(1.0, programs / rest)
        clocks += -(-rest * groups // programs) * step
        clocks += ROWS_SHARED_CLOCKS + shares / ROWS_SHARES_A_CLOCK
    own_us = 1e6 * clocks / machine.clock_hz
    memory_us = 1e6 * product.moved_bytes / machine.bandwidth
    return ROWS_LAUNCH_US + (own_us**SHARPNESS + memory_us**SHARPNESS) ** (1 / SHARPNESS)


def ring_us(config: Config, product: Product, machine: Machine) -> float:
    """Return the time of words through rings: of memory, or of the fullest warps' unpacking."""
    blocks = math.ceil(product.n / BLOCK_ROWS)
    turns = math.ceil(math.ceil(blocks / machine.multiprocessors) * config.blocks / config.warps)
    steps = turns * math.ceil(product.groups / config.blocks)
    own_us = 1e6 * steps * RING_CLOCKS * config.warps / 4 / machine.clock_hz
    memory_us = 1e6 * product.moved_bytes / machine.bandwidth
    bounds = (own_us**SHARPNESS + memory_us**SHARPNESS) ** (1 / SHARPNESS)
    return RING_LAUNCH_US + 2e6 * product.rows * product.k / RING_X_A_S + bounds


def cublas_us(rows: int, n: int, k: int, machine: Machine) -> float:
    """Return the time of a 16-bit product of many rows: waves of the tiles that suit it best."""
    a_clock = machine.flops_a_clock * machine.clock_hz * CUBLAS_RATE
    times = []
    for m_tile, n_tile, rate in CUBLAS_TILES:
        tiles = -(-rows // m_tile) * -(-n // n_tile)
        for split in range(1, 5):
            if split > 1 and (tiles * split > 2 * machine.multiprocessors or k < 1024 * split):
                break
            waves = -(-tiles * split // machine.multiprocessors)
            us = waves * 2e6 * m_tile * n_tile * k / split / (a_clock * rate)
            if split > 1:
                us += CUBLAS_SPLIT_US + 1e6 * 8 * split * rows * n / CUBLAS_SUMS_A_S
            times.append(us)
    return min(times)


@functools.cache
def _table() -> tuple[dict[str, float], dict[tuple[str, str | None], StepTime]]:
    """Return the constants and every form's times, by form and kind of weights, None for any."""
    data = json.loads(Path(__file__).with_name("step_times.json").read_text())
    forms = {
        (e["form"], e.get("weights")): StepTime(
            e["start_us"], e["step_us"], e["share_us"], e.get("registers") or {}
        )
        for e in data["forms"]
    }
    return data["constants"], forms
