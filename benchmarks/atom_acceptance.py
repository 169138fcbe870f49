"""QSpec with Atom's weights: how many W4A4 drafts their own W4A16 target accepts, as rows.

    python benchmarks/atom_acceptance.py                  the demo model, plain and injected

At places of held-out text gamma tokens are drafted greedily from the target's KV cache and
verified at once. The value is the share of judged drafts (those up to the first refused one) that
are accepted; whole prompts of held-out text, not free running text, which small models repeat.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from lib.atom_models import ReadyLayers, Subject, add_arguments, quantized, subjects
from lib.rows import write_row

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.atom_weight import AtomWeight
from llmpq.profiler.quantize.one_layer import Recipe
from llmpq.profiler.quantize.recipes import SMOOTHING
from llmpq.runtime.models.linear import Weight
from llmpq.runtime.step import Step
from llmpq.runtime.tools.evaluate import perplexity
from reference.pipeline import ReferencePipeline

MAX_GAMMA = 7
CONTEXT = 256
ROWS = 16
"""Places drafted from at once."""


def recipes(outliers: int, group: int) -> dict[str, Recipe]:
    """Return the weights compared."""
    rtn = AtomScheme(weight_clip=1.0, activation_clip=1.0)
    paper = AtomScheme(group_size=group, outliers=outliers)
    signed = replace(paper, weight_clip=None, activation_clip=0.95, signed_scale=True)
    improved = Recipe(scheme=signed, rotated=("down",), smoothing=SMOOTHING)
    return {
        "rtn group 128": Recipe(scheme=rtn, method="rtn"),
        "atom (paper)": Recipe(scheme=paper),
        "atom (default)": improved,
        "atom (--in-turn)": replace(improved, compensated=True),
    }


def main() -> None:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--only", nargs="*", help="weights whose name contains one of these")
    parser.add_argument("--places", type=int, default=64)
    args = parser.parse_args()
    for subject in subjects(args, num_tokens=1 << 30):
        for name, recipe in recipes(subject.spec.hidden // 32, args.group).items():
            if not args.only or any(word in name for word in args.only):
                measure(subject, name, recipe, args)


def measure(subject: Subject, name: str, recipe: Recipe, args: argparse.Namespace) -> None:
    """Write the rows of one set of weights."""
    ready = quantized(subject, recipe)
    draft, target = (pipeline(subject, ready, bits) for bits in (4, 16))
    lengths = accepted_lengths(subject.tokens, draft, target, args.places)
    target_ppl = perplexity(target.scores, subject.tokens[:8192], window=1024).value
    for gamma in range(2, MAX_GAMMA + 1):
        judged = sum(min(length + 1, gamma) for length in lengths)
        accepted = sum(min(length, gamma) for length in lengths)
        write_row(
            "atom.jsonl",
            bench="atom_acceptance",
            case={
                "model": subject.name,
                "weights": name,
                "group": recipe.scheme.group_size,
                "gamma": gamma,
                "places": len(lengths),
                "text": args.text.name,
                "target_perplexity": round(target_ppl, 4),
            },
            unit="share",
            samples=[accepted / judged],
            **subject.made(),
        )
        print(f"{subject.name:18} {name:30} gamma {gamma}  {accepted / judged:.3f}", flush=True)


def pipeline(subject: Subject, ready: ReadyLayers, activation_bits: int) -> ReferencePipeline:
    """Return the model with activations of these bits; weights are shared."""

    def change(weight: Weight) -> Weight:
        assert isinstance(weight, AtomWeight)
        return weight.with_activations(activation_bits)

    return subject.pipeline(ready.changed(change))


def accepted_lengths(
    tokens: Sequence[int], draft: ReferencePipeline, target: ReferencePipeline, places: int
) -> list[int]:
    """Return how many of MAX_GAMMA drafts each place accepts before its first refusal."""
    stride = (len(tokens) - CONTEXT) // places
    starts = range(0, stride * places, stride)
    lengths: list[int] = []
    for first in range(0, places, ROWS):
        rows = [list(tokens[s : s + CONTEXT]) for s in starts[first : first + ROWS]]
        lengths += _draft_and_verify(torch.tensor(rows, device=target.device), draft, target)
    return lengths


def _draft_and_verify(
    context_BT: torch.Tensor, draft: ReferencePipeline, target: ReferencePipeline
) -> list[int]:
    batch = context_BT.shape[0]
    caches = target.caches(batch, CONTEXT + MAX_GAMMA + 2)

    def step(start: int, count: int) -> Step:
        return Step.of(range(batch), [start] * batch, [count] * batch, device=target.device)

    logits_BV = target.logits(context_BT, step(0, CONTEXT), caches)
    drafted = [logits_BV.argmax(-1)]
    for place in range(MAX_GAMMA):
        logits_BV = draft.logits(drafted[-1][:, None], step(CONTEXT + place, 1), caches)
        drafted.append(logits_BV.argmax(-1))
    given_BQ = torch.stack(drafted[:-1], dim=1)
    # The verifier writes over the keys and values that the drafts left.
    logits_BQV = target.logits(given_BQ, step(CONTEXT, MAX_GAMMA), caches, all_positions=True)
    agree_BQ = logits_BQV.argmax(-1) == torch.stack(drafted[1:], dim=1)
    return agree_BQ.long().cumprod(dim=1).sum(dim=1).tolist()


if __name__ == "__main__":
    main()
