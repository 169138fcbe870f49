"""The paper's 11 clusters: which model each has, and the command that plans it."""

from __future__ import annotations

MODELS = {
    1: "opt 13b", 2: "opt 13b", 3: "opt 30b", 4: "opt 30b", 5: "opt 66b", 6: "opt 66b",
    7: "bloom 176b", 8: "bloom 176b", 9: "opt 30b", 10: "opt 66b", 11: "bloom 176b",
}  # fmt: skip


def cluster_flags(number: int, objective: str) -> list[str]:
    """Return the issue's command for a paper cluster."""
    name, size = MODELS[number].split()
    flags = f"--cluster clusters/paper/{number:02d}.yaml --model-name {name} --model_size {size}"
    job = "--global_bz 32 --s 512 --n 100 --theta 1 --bits 16,8,4,3"
    return f"{flags} {job} --objective {objective}".split()
