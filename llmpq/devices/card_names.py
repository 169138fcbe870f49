"""How people, drivers and clouds spell a card: `RTX 4090`, `rtx4090`, `A100-SXM4-80GB`, `3060 12g`.

Knows no table of cards: it only brings a spelling to one form, in which two spellings of a card are
equal. What tells cards apart stays (`Laptop`, `D`, `Ti`, `NVL`); makers' and brands' names go.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

_EMPTY_WORDS = frozenset(
    (
        "nvidia",
        "geforce",
        "tesla",
        "amd",
        "radeon",
        "instinct",
        "intel",
        "corporation",
        "inc",
        "gpu",
        "graphics",
        "card",
        "video",
        "edition",
        "founders",
        "fe",
        "generation",
        "workstation",
        "server",
        "blackwell",
    )
)
"""Words that stand in a card's full name and tell it from no other card."""
_FORM_FACTORS = ("pcie", "sxm")
_MEMORY = re.compile(r"(?:(?<= )|(?<=[a-z]))(\d+(?:\.\d+)?) ?(?:gb|gib)\b|(?<= )(\d+) ?g\b")
_MEMORY_TYPE = re.compile(r"\b(?:gddr|hbm)\d*[a-z]*\b")
_MOBILE = re.compile(r"\b(?:max q )?(?:mobile|notebook)\b")
"""How PCI's list of devices and people call a laptop's card: `RTX 4070 Max-Q / Mobile`."""
_TRAILING = re.compile(r" (\d{1,3})$")


@dataclass(frozen=True)
class CardName:
    """A spelling in its one form."""

    core: str
    """Letters and digits that name the card: `4090`, `a100`, `a100sxm`, `7900xtx`."""
    memory_gb: float | None = None
    """Memory the spelling states, as cards are sold: 80 of `A100 80GB`."""


@lru_cache(maxsize=4096)
def card_name(spelling: str) -> CardName:
    """Bring a spelling to its one form."""
    text = re.sub(r"\((?:r|tm|c)\)", " ", spelling.lower())
    text = " " + " ".join(re.sub(r"[^a-z0-9.]+", " ", text).split())
    text = _MOBILE.sub("laptop", text)
    stated = _MEMORY.search(text)
    if stated is not None:
        text = text[: stated.start()] + " " + text[stated.end() :]
    text = _MEMORY_TYPE.sub(" ", text)
    words = [word for word in text.split() if word not in _EMPTY_WORDS]
    words = [re.sub(r"^sxm\d$", "sxm", word) for word in words]
    core = re.sub(r"^(?:rtx|gtx|rx|gt)(?=.)", "", "".join(words))
    core = re.sub(r"^(\d{4}(?:ti)?)s$", r"\1super", core)
    core = re.sub(r"^(\d{4}(?:ti)?)m$", r"\1laptop", core)
    return CardName(core, float(stated[1] or stated[2]) if stated else None)


def find_kind(
    spelling: str, names: Mapping[str, Iterable[str]], memory_gib: Mapping[str, float]
) -> str | None:
    """Return the kind a spelling means, None where none or several could be meant.

    `names` are each kind's spellings, `memory_gib` what its driver reports. A stated memory must be
    that of the card: `RTX 4090 48GB` is none of the table's.
    """
    index: dict[CardName, str] = {}
    for kind, spellings in names.items():
        for known in (kind, *spellings):
            index.setdefault(card_name(known), kind)
    for wanted in _readings(spelling):
        if wanted in index:
            return index[wanted]
        kinds = {kind: memory_gib[kind] for name, kind in index.items() if name.core == wanted.core}
        if wanted.memory_gb is not None:
            kinds = {k: size for k, size in kinds.items() if sold_as(size, wanted.memory_gb)}
            if kinds:
                stated = wanted.memory_gb
                return min(kinds, key=lambda kind: abs(kinds[kind] - stated))
        elif len(kinds) == 1:
            return next(iter(kinds))
    return None


def _readings(spelling: str) -> list[CardName]:
    """Return what a spelling may mean, likeliest first: `a100 80` has a memory, form factors go."""
    found = [card_name(spelling)]
    number = _TRAILING.search(" ".join(re.sub(r"[^a-z0-9]+", " ", spelling.lower()).split()))
    if number is not None and found[0].memory_gb is None:
        found.append(card_name(f"{spelling}GB"))
    for name in list(found):
        for form in _FORM_FACTORS:
            if name.core.endswith(form):
                found.append(CardName(name.core.removesuffix(form), name.memory_gb))
    return found


def sold_as(reported_gib: float, sold_gb: float) -> bool:
    """Whether a card that reports so many GiB may be sold as one of so many GB.

    Error correction and the driver keep up to a tenth: 22.5 of 24, 45 of 48, 14.8 of 16.
    """
    return 0.9 <= reported_gib / sold_gb <= 1.01 if sold_gb > 0 else False


_BRANDS = {
    "NVIDIA": {"nvidia", "geforce", "rtx", "gtx", "quadro", "tesla", "titan"},
    "AMD": {"amd", "radeon", "rx", "instinct", "ryzen"},
    "Intel": {"intel", "arc"},
    "Apple": {"apple"},
}
"""Words that say who made a card."""


def nearest_kinds(
    spelling: str,
    names: Mapping[str, Iterable[str]],
    makers: Mapping[str, str],
    most: int = 3,
) -> list[str]:
    """Return the kinds spelled most like a name, nearest first; none that is unlike.

    Where a name says its maker, only that maker's; a series counts more than a number: `gb300` is
    nearer to `GB10` than to an `RTX-3050`.
    """
    words = set(re.findall(r"[a-z]+", spelling.lower()))
    own = {maker for maker, brand in _BRANDS.items() if brand & words}
    wanted = card_name(spelling).core
    best: dict[str, float] = {}
    for kind, spellings in names.items():
        if own and makers[kind] not in own:
            continue
        for known in (kind, *spellings):
            best[kind] = max(best.get(kind, 0.0), _likeness(wanted, card_name(known).core))
    near = sorted((kind for kind in best if best[kind] >= 0.5), key=lambda kind: -best[kind])
    return near[:most]


def _likeness(wanted: str, known: str) -> float:
    """Return how like two names are, 0 to 1: alike in series and number, in series, in spelling."""
    ratio = difflib.SequenceMatcher(None, wanted, known).ratio()
    (series, number), (other, others) = (_series(wanted), _series(known))
    if series != other:
        return 0.6 * ratio
    if number and number == others:
        return 0.9 + 0.1 * ratio
    return (ratio + 0.9) / 2 if series else ratio


def _series(core: str) -> tuple[str, str]:
    """Return the letters and the number that a name begins with: `gb`, `10`."""
    match = re.match(r"([a-z]*)(\d*)", core)
    assert match is not None, "matches the empty text"
    return match[1], match[2]
