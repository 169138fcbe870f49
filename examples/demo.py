"""The whole of llmpq on this machine: profile, indicator, plan, run, report.

    python examples/demo.py [--out out/demo]

Every step is a command a user could type; each is printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BATCH, PROMPT_LEN, GEN_LEN = 8, 32, 64
SAMPLING = "--temperature 0.7 --top-p 0.9"


def main() -> int:
    """Run the five steps; the exit code is that of the first step that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for all files")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "samples.jsonl").unlink(missing_ok=True)  # this run's measurements only
    model, cluster = HERE / "demo-7m", HERE / "cpu-two-stages.yaml"
    workload = f"--global_bz {BATCH} --s {PROMPT_LEN} --n {GEN_LEN}"
    steps = (
        f"llmpq-profile --model {model} --cluster {cluster} --dtype float32 --quick"
        f" --max-batch {BATCH} --max-len {PROMPT_LEN + GEN_LEN}"
        f" --bits 16,4 {SAMPLING}"
        f" --samples {out}/samples.jsonl -o {out}/costs.json",
        f"llmpq-profile indicator --kind variance --model {model} --text {HERE}/heldout.txt"
        f" -o {out}/omega.json",
        f"llmpq-algo --cluster {cluster} --model {model} --costs {out}/costs.json"
        f" --omega_file {out}/omega.json {workload} --theta 0.01 --bits 16,4"
        f" --engines 1 -o {out}/plan.json --report {out}/plan.html",
        f"llmpq-dist --strat_file_name {out}/plan.json --model {model} -i {HERE}/prompts.jsonl"
        f" -o {out}/outputs.jsonl --overwrite --max_tokens {GEN_LEN} --ignore-eos {SAMPLING}"
        f" --seed 1 --backend ray --trace {out}/trace.json --report {out}/report.json"
        f" --report {out}/run.html",
    )
    started = time.monotonic()
    for step in steps:
        sys.stdout.write(f"\n$ {step}\n")
        sys.stdout.flush()
        command = shlex.split(step)
        code = subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]]
        ).returncode
        if code:
            sys.stderr.write(f"the step above ended with exit code {code}\n")
            return code
    show_outputs(out / "outputs.jsonl")
    sys.stdout.write(
        f"\nplan, costs, omega, outputs, trace and report are in {out}/; "
        f"look at plan.html and run.html ({time.monotonic() - started:.0f} s in all)\n"
    )
    return 0


def show_outputs(path: Path) -> None:
    """Print the generated text of every request."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text = row["response"]["body"]["choices"][0]["text"]
        sys.stdout.write(f"\n--- {row['custom_id']} ---\n{text}\n")


if __name__ == "__main__":
    sys.exit(main())
