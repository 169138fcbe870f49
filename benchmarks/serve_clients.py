"""What guidellm and aiperf say of a server, against what its /metrics say of the same requests.

    python benchmarks/serve_clients.py --guidellm BIN --aiperf BIN [--write]

BIN: the programs, each installed in an environment of its own (`pip install guidellm`, `pip install
aiperf`). Starts `llmpq-dist serve`, runs the commands of docs/how-to/serve.md, and prints requests,
tokens of prompts and answers (they must be equal) and the mean times (`_sum / _count`) of both
sides. The clients' times hold the way to the server and their own work, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row
from serve_load import free_port, wait_until_ready

COUNTS = {
    "requests": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "answer_tokens": "vllm:generation_tokens_total",
}
TIMES = {
    "first_token_ms": "vllm:time_to_first_token_seconds",
    "inter_token_ms": "vllm:inter_token_latency_seconds",
    "whole_ms": "vllm:e2e_request_latency_seconds",
}


def main() -> None:
    """Start a server, run the clients, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm")
    parser.add_argument("--aiperf")
    parser.add_argument("--model", default="examples/demo-7m")
    parser.add_argument("--serve-flags", default="--max-num-seqs 4", help="of llmpq-dist serve")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "llmpq.runtime", "serve", "--model", options.model, "--port",
               str(port), "--no-access-log", *options.serve_flags.split()]  # fmt: skip
    url, ran = f"http://127.0.0.1:{port}", []
    with subprocess.Popen(command) as process:
        try:
            wait_until_ready(port, process)
            for name, run in (("guidellm", guidellm), ("aiperf", aiperf)):
                if getattr(options, name):
                    before = scraped(url)
                    with tempfile.TemporaryDirectory() as folder:
                        heard = run(getattr(options, name), url, options, Path(folder))
                    ran.append((name, heard, grown(before, scraped(url))))
        finally:
            process.terminate()
    for name, heard, told in ran:
        off = {key: heard[key] / told[key] - 1 for key in told}
        for key, share in off.items():
            print(f"{name:9} {key:15} client {heard[key]:10.3f} server {told[key]:10.3f} "
                  f"{share:+8.2%}")  # fmt: skip
        if options.write:
            names = ("requests", "streams", "prompt_tokens", "answer_tokens", "serve_flags")
            asked = {key: getattr(options, key) for key in names}
            case = {"model": Path(options.model).name, "client": name, **asked, "heard": heard,
                    "metrics": told}  # fmt: skip
            worst = max(abs(off[key]) for key in TIMES)
            write_row("serve.jsonl", bench="serve_clients", case=case, samples=[worst], noisy=True,
                      unit="largest share between the means")  # fmt: skip
    if any(heard[key] != told[key] for _, heard, told in ran for key in COUNTS):
        sys.exit("the counts differ")


def guidellm(program: str, url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run guidellm; return its counts and means."""
    name = Path(options.model).name
    data = f"prompt_tokens={options.prompt_tokens},output_tokens={options.answer_tokens}"
    run([
        program, "run",
        "--backend", f"kind=openai_http,target={url},model={name},request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={Path(options.model).resolve()}",
        "--data", f"kind=synthetic_text,{data}",
        "--profile", f"kind=concurrent,streams={options.streams}",
        "--constraint", f"kind=max_requests,count={options.requests}",
        "--output", f"kind=json,path={folder / 'report.json'}", "--disable-console",
    ])  # fmt: skip
    told = json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"]
    ended = {key: told[key]["successful"] for key in (
        "prompt_token_count", "output_token_count", "time_to_first_token_ms",
        "inter_token_latency_ms", "request_latency")}  # fmt: skip
    return {
        "requests": told["request_totals"]["successful"],
        "prompt_tokens": ended["prompt_token_count"]["total_sum"],
        "answer_tokens": ended["output_token_count"]["total_sum"],
        "first_token_ms": ended["time_to_first_token_ms"]["mean"],
        "inter_token_ms": ended["inter_token_latency_ms"]["mean"],
        "whole_ms": 1e3 * ended["request_latency"]["mean"],
    }


def aiperf(program: str, url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run aiperf; return its counts and means."""
    run([
        program, "profile", "--url", url, "--model", Path(options.model).name,
        "--tokenizer", str(Path(options.model).resolve()),
        "--endpoint-type", "completions", "--streaming",
        "--synthetic-input-tokens-mean", str(options.prompt_tokens),
        "--output-tokens-mean", str(options.answer_tokens), "--use-legacy-max-tokens",
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--concurrency", str(options.streams), "--request-count", str(options.requests),
        "--artifact-dir", str(folder), "--ui-type", "none",
    ])  # fmt: skip
    told: Mapping[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "requests": told["request_count"]["avg"],
        "prompt_tokens": told["total_usage_prompt_tokens"]["avg"],
        "answer_tokens": told["total_usage_completion_tokens"]["avg"],
        "first_token_ms": told["time_to_first_token"]["avg"],
        "inter_token_ms": told["inter_token_latency"]["avg"],
        "whole_ms": told["request_latency"]["avg"],
    }


def run(command: list[str]) -> None:
    """Run a client; leave with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {(done.stdout + done.stderr)[-3000:]}")


def scraped(url: str) -> dict[str, float]:
    """Return the sums of a server's samples by name."""
    sums: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the counts and mean times between two scrapes."""
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}
    times = {key: 1e3 * new[f"{name}_sum"] / new[f"{name}_count"] for key, name in TIMES.items()}
    return {key: new[name] for key, name in COUNTS.items()} | times


if __name__ == "__main__":
    main()
