"""The one table of the README's first page: a device, a model, llmpq, a peer, the ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from report.table_cells import Row, load, markdown

HEAD = ("device", "model", "llmpq", "peer", "ratio")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison: the newest row that matches and has the peer's figure."""

    device: str
    model: str
    file: str
    bench: str
    where: dict[str, Any]
    peer: str
    """A key of the row's baselines, and what readers call it."""
    called: str

    def cells(self) -> list[str]:
        """Return the line's cells."""
        rows: list[Row] = [
            row for row in load(self.file, self.bench, self.where) if self.peer in row["baselines"]
        ]
        row = rows[-1]
        ours, theirs = row["value"], row["baselines"][self.peer]
        return [
            self.device,
            self.model,
            f"{ours:.0f}",
            f"{self.called}: {theirs:.0f}",
            f"{ours / theirs:.2f}x",
        ]


def e2e(device: str, title: str, peer: str, called: str, **where: Any) -> Line:
    """Return a line of LLM-PQ's offline job: 32 requests of 512 + 100 tokens."""
    job = {"batch": 32, "prompt": 512, "gen": 100, "kv": "kv16"}
    return Line(
        device=device,
        model=title,
        file="e2e.jsonl",
        bench="e2e",
        where={**job, **where},
        peer=peer,
        called=called,
    )


LLAMA, VLLM = "llama-3.1-8b", "vllm_0.23"
LINES = (
    e2e(
        "H200",
        "Llama-3.1-8B, 16 bits",
        VLLM,
        "vLLM 0.23",
        model=LLAMA,
        cluster="h200x1",
        precision="w16a16",
    ),
    e2e(
        "H200",
        "Llama-3.1-8B, 4 bits",
        f"{VLLM}_machete",
        "vLLM 0.23",
        model=LLAMA,
        cluster="h200x1",
        precision="w4a16",
        symmetric=True,
    ),
    e2e(
        "2 x H200",
        "Llama-3.1-8B, 16 bits",
        VLLM,
        "vLLM 0.23",
        model=LLAMA,
        cluster="h200x2",
        precision="w16a16",
    ),
    e2e(
        "2 x H200",
        "OPT-30B, 16 bits",
        VLLM,
        "vLLM 0.23",
        model="opt-30b",
        cluster="h200x2",
        precision="w16a16",
    ),
    Line(
        device="2 weak + 2 strong GPUs (emulated on H200)",
        model="OPT-30B, bits by plan, 4-bit cache",
        file="e2e.jsonl",
        bench="heterogeneous",
        where={"cluster": "emulated-2-weak-2-strong", "plan": "exact"},
        peer="pipeedge",
        called="PipeEdge's plan, same runtime",
    ),
    Line(
        device="CPU, one thread",
        model="demo-7m, float32",
        file="hf_generate.jsonl",
        bench="hf_generate",
        where={"batch": 8, "threads": 1},
        peer="hf",
        called="Transformers",
    ),
)


class FrontTable:
    """Renders `LINES`."""

    def render(self) -> str:
        """Return the table as Markdown."""
        return markdown(HEAD, [line.cells() for line in LINES])
