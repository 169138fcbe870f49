"""How one product is computed: what may be chosen of a launch (`Config`), and the launch decided.

Which one suits a shape is choice.py's affair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

MOST_ROWS = {2: 256, 3: 192}
"""wgmma_rows: rows of x at most, by warpgroups: what a thread's registers hold."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to compute a product by a kernel: "gemv", "splitk_gemm", "wgmma_gemm", "wgmma_rows",
    "dequantize", "cuda_gemv".

    "dequantize" makes w in x's type, for cuBLAS; "cuda_gemv" chooses its own tiles.
    """

    kernel: str
    blocks: int = 1
    """16-row blocks of w a warp holds (BH)."""
    warps: int = 4
    depth: int = 2
    """k-groups of w in flight in registers."""
    x_depth: int = 2
    """gemv: k-groups of x in flight."""
    bm: int = 16
    """splitk_gemm, wgmma_gemm, wgmma_rows: rows of x a program multiplies; of wgmma_gemm a power of
    two, or the sum of two, as 160; of wgmma_rows any multiple of 8."""
    stages: int = 1
    """splitk_gemm: cp.async stages; 1 keeps weights in registers instead. wgmma_gemm: slots of x's
    ring."""
    x_stages: int = 1
    """splitk_gemm with stages = 1: slots of x's ring, filled by cp.async while words are in
    registers."""
    split: int = 1
    """splitk_gemm: programs that share one tile's K; wgmma_rows: those of a cluster."""
    scale_w: bool = False
    """splitk_gemm: scale the operand instead of the accumulator."""
    registers: int | None = None
    """splitk_gemm, wgmma_gemm: registers of a thread at most; None leaves it to the launch."""
    cut: int = 0
    """wgmma_gemm, wgmma_rows: last waves of tiles whose K is shared out evenly, the unfinished one
    first."""
    programs: int = 0
    """wgmma_gemm, wgmma_rows: programs at most; 0: one a multiprocessor."""
    warpgroups: int = 2
    """wgmma_gemm, wgmma_rows: warpgroups of 64 * blocks rows of w: 2 or 3."""
    asker: bool = False
    """wgmma_gemm: a warp of its own asks for x, not the first warpgroup."""
    piece_mib: int = 0
    """dequantize: of w in x's type, made and multiplied one piece after the other; 0: all at once.
    A piece that the L2 holds is not read from memory, and all of w is never there."""

    def __post_init__(self) -> None:
        # Triton 3.6 overlaps the next step's operand with wgmma still reading the last one's
        # registers when a pipelined loop feeds it from arithmetic: wrong sums (H200).
        if self.scale_w and self.stages > 1:
            raise ValueError("scale_w needs stages = 1: pipelined loops of it compute wrong sums")
        if self.asker and (self.warpgroups != 2 or self.blocks * self.bm > 128):
            raise ValueError(
                f"asker: got {self.warpgroups} warpgroups with tiles of {self.blocks} x {self.bm}, "
                "expected 2 and at most 128: with its warp, a thread has 168 registers"
            )
        if self.kernel == "wgmma_rows":
            most = MOST_ROWS.get(self.warpgroups, 0)
            # With two blocks of rows of w and K shared out, sums were wrong now and then (H200).
            if not 1 <= self.split <= 4 or (self.split > 1 and self.cut):
                raise ValueError(
                    f"wgmma_rows: got {self.split} programs that share K, cut {self.cut}; expected "
                    "1 to 4, and one of the two"
                )
            if self.bm % (8 * self.split):
                raise ValueError(
                    f"wgmma_rows: got tiles of {self.bm} rows of x with {self.split} programs that "
                    "share K, expected a multiple of 8 of each program"
                )
            if self.bm < 8 or self.bm % 8 or self.bm > most or self.blocks != 1:
                raise ValueError(
                    f"wgmma_rows: got {self.warpgroups} warpgroups with tiles of {self.blocks} x "
                    f"{self.bm}, expected 2 or 3, one block and a multiple of 8, at most {most}"
                )
            return
        rest = self.bm - (1 << self.bm.bit_length() - 1)
        if rest and (
            self.kernel != "wgmma_gemm" or self.blocks > 1 or rest < 8 or rest & (rest - 1)
        ):
            raise ValueError(
                f"bm: got {self.bm} with {self.kernel} and {self.blocks} blocks, expected a power "
                "of two or, gluon with one block, the sum of two from 8 on"
            )


DENSE = Config(kernel="dequantize")
PIECES = tuple(Config(kernel="dequantize", piece_mib=mib) for mib in (32, 128))
"""What the L2 holds, and what plans of Hopper have room for (llmpq/sizes/gpu_workspace.py)."""


@dataclass(frozen=True, kw_only=True)
class ProductPlan:
    """A decided product: the configuration and the launch it makes."""

    config: Config
    pdl: bool
    kwidth4: bool
    interpret: bool


def make_plan(
    config: Config, capability: tuple[int, int], *, interpret: bool = False
) -> ProductPlan:
    """Fit a configuration to a compute capability."""
    hopper_on = capability >= (9, 0)
    return ProductPlan(
        config=config,
        pdl=hopper_on and not interpret,
        kwidth4=not (9, 0) <= capability < (12, 0),  # mma.sync there
        interpret=interpret,
    )


def config_entry(config: Config) -> dict[str, object]:
    """Return the fields of a configuration that differ from the defaults, for `tuned/*.json`."""
    plain = asdict(Config(kernel=config.kernel))
    return {k: v for k, v in asdict(config).items() if k == "kernel" or v != plain[k]}


PIECE_ROWS = 256
"""Rows of w in cuBLAS's tiles: of which pieces have whole ones."""


def piece_rows(piece_mib: int, n: int, k: int) -> int:
    """Return the rows of w that are made at a time, 0: all of them are one piece.

    Pieces are as large as each other, so that the last one fills the GPU too.
    """
    most = max(PIECE_ROWS, (piece_mib << 20) // (2 * k) // PIECE_ROWS * PIECE_ROWS)
    if not piece_mib or most >= n:
        return 0
    return -(-n // -(-n // most) // PIECE_ROWS) * PIECE_ROWS
