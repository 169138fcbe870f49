"""What all tests share: tiers, seeds, the interpreter, and tiny random models of every family."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model that is not here

ALL = "LLMPQ_ALL_TESTS" in os.environ
"""Whether every drawn problem is tried, at every level of a CPU's instructions: `make test-all`."""
OPTIMISED = "LLMPQ_NATIVE_OPTIMISED"
AS_ASKED = ALL or os.environ.get(OPTIMISED, "-O1") != "-O1"
"""Whether native code is compiled as asked for; a second process has "-O1" of the first."""
if not AS_ASKED:
    # Code for one level of a CPU's instructions takes 9 s of a core, not 24; commands have it too.
    os.environ[OPTIMISED] = "-O1"
VOCAB, HIDDEN, POSITIONS = 199, 64, 128
LAYERS = 2 if os.environ.get("TRITON_INTERPRET") == "1" else 3
"""Of a first model: the interpreter takes seconds for each."""
LOUD = ("opt", "bloom") if LAYERS == 2 else ()
"""Kinds that would repeat a prompt's last token, whatever two layers of small weights attend to."""
ALONE = {
    "quick": ("pure", "quick"),
    **{name: (name,) for name in ("interpret", "compile", "cluster", "hosts_long")},
}
"""What `-m` may ask for alone, and the marks that a file of it has."""
PLAN = ("benchmarks", "clusters", "docs", "llmpq", "planner")
"""Folders whose tests plan, and run no engine."""
APART = frozenset((*ALONE, "hosts")) - {"quick"}
"""Tiers that are asked for alone: a file of nothing else has no test of another."""
LONGEST = (
    "models/test_more_families.py", "cli/test_topologies.py", "models/test_recurrent_families.py",
    "traffic/test_traffic_search.py", "launch/test_shared_stages.py",
    "engine/test_tensor_parallel.py", "serve/test_every_door.py", "drafts/test_speculation.py",
    "solving/test_topology_search.py", "engine/test_paged_engine.py",
    "exact/test_exact.py", "front/test_front.py", "cli/test_eval_command.py",
    "engine/test_window_pools.py", "on_ray/test_connect.py", "hosts/test_how_to.py",
    "cli/test_dist_errors.py", "exact/test_deadline.py", "tests/test_readme.py",
    "replicas/test_replicas.py", "nodes/test_two_nodes.py", "launch/test_engine_parity.py",
    "backends/test_cuda_paged_interpret.py", "backends/test_cuda_families_interpret.py",
    "low_bit/test_latent_codes_compile.py", "paged/test_packed_pages_compile.py",
)  # fmt: skip
"""Files whose tests take longest, the longest first."""


@pytest.fixture(scope="session")
def seeds() -> Callable[[Sequence[int]], Sequence[int]]:
    """Every third of the seeds of a test, a dozen of many; or all of them."""
    return lambda whole: whole[:: 1 if ALL else max(3, len(whole) // 12)]


signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Behind nohup, too: tests that send it await what happens at a terminal."""


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Triton's interpreter, where it is asked for, as tests/interpreter.py has it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    found = spec_from_file_location("interpreter", Path(__file__).with_name("interpreter.py"))
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    with module.quickened():
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no test of the tier asked for: torch alone takes seconds."""
    asked = config.option.markexpr
    if not asked or not collection_path.name.startswith("test_"):
        return None
    found = set(re.findall(r"\bmark\.(\w+)", collection_path.read_text(encoding="utf-8")))
    if asked in ALONE:
        return None if found & {*ALONE[asked]} else True
    apart = asked.startswith("not interpret") and found & APART
    return True if apart and not found & {"pure", "cpu", "gpu", "quick"} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: two processes then end at about the same time."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: places.get(f"{item.path.parent.name}/{item.path.name}", len(places))
    )
    if os.environ.get("TRITON_INTERPRET") == "1":
        other = pytest.mark.skip(reason="models have two layers here; run without TRITON_INTERPRET")
        for item in items:
            if not item.get_closest_marker("interpret"):
                item.add_marker(other)
    if ALL:
        return
    left_out = {item for item in items if item.get_closest_marker("seldom")}
    thin: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item in left_out or item.get_closest_marker("dealt"):
            continue
        if item.get_closest_marker("thin") and hasattr(item, "callspec"):
            thin.setdefault((item.path, item.originalname), []).append(item)
    for group in thin.values():
        left_out |= _not_needed(group)
    if any(_level(item) == "avx512_bf16" for item in items):
        # All that a CPU with VNNI runs, one with bfloat16 products runs, too.
        left_out |= {item for item in items if _level(item) == "avx512_vnni"}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _not_needed(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return those without whom every value of each parameter still occurs, or every few of values.

    `@pytest.mark.thin` keeps every value, `thin(2)` every pair of values of two parameters. Values
    that one `parametrize` lists together count as one, unless given `apart=True`.
    """
    mark = items[0].get_closest_marker("thin")
    few, lists = (*mark.args, 1)[0], [mark.args[0] for mark in items[0].iter_markers("parametrize")]
    if mark.kwargs.get("apart"):
        lists = []
    lists = [n.replace(" ", "").split(",") if isinstance(n, str) else n for n in lists]
    values = [_values(item, lists) for item in items]
    wanted = [set(combinations(own, min(few, len(own)))) for own in values]
    left = set().union(*wanted)
    used, kept = Counter(), set()
    while left:
        # What adds most; of several, that whose values came least often.
        place = max(
            range(len(items)),
            key=lambda i: (len(wanted[i] & left), -sum(used[v] for v in values[i]), -i),
        )
        left -= wanted[place]
        used.update(values[place])
        kept.add(place)
    return {item for place, item in enumerate(items) if place not in kept}


def _values(item: pytest.Item, lists: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return a test's values of the lists of parameters, and of every parameter in none of them."""
    given = {name: repr(value) for name, value in item.callspec.params.items()}
    whole = [tuple(given.pop(name) for name in names if name in given) for names in lists]
    return [*((names[0], str(v)) for names, v in zip(lists, whole, strict=True)), *given.items()]


def _level(item: pytest.Item) -> object:
    """Return the CPU's instructions that a test is of, if it is of some."""
    return item.callspec.params.get("level") if hasattr(item, "callspec") else None


def _is_of_a_lesser_level(item: pytest.Item) -> bool:
    """Whether a test is of a level of instructions that is not the best of this CPU."""
    level = _level(item)
    if level is None:
        return False
    from llmpq.kernels.native.library import LEVELS, best_level

    best = best_level()
    return level in LEVELS and best is not None and level != best.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs our own code for CPUs where there is none; let no progress bar watch."""
    if item.get_closest_marker("native"):
        # Compiled when a test first asks, not while tests are collected.
        from llmpq.kernels.native.library import library

        if library() is None:
            pytest.skip("needs an x86-64 CPU with AVX2 and a C++ compiler")
    if not AS_ASKED:
        # Only the tests of a lesser level run its code, on small shapes: 4 s of a core.
        os.environ[OPTIMISED] = "-O0" if _is_of_a_lesser_level(item) else "-O1"
    _end_watch()


@pytest.fixture(scope="module", autouse=True)
def _without_threads_of_before(request: pytest.FixtureRequest) -> None:
    """End the threads of engines that tests before have dropped, where a file may plan.

    Beside any other thread the planner forks no search: it starts an interpreter for each.
    """
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    if room in PLAN and threading.active_count() > 1:
        gc.collect()  # pools of threads end with what they belong to


def _end_watch() -> None:
    """End the thread that a progress bar of a test before has left, and let none begin."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        return
    bars.monitor_interval = 0
    if bars.monitor is not None:
        bars.monitor.exit()
        bars.monitor = None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count as quick what is pure and not slow."""
    if item.get_closest_marker("pure") and not item.get_closest_marker("slow"):
        item.add_marker("quick")


def _config(kind: str) -> Any:
    """Return a transformers config: shapes that differ where mistakes hide."""
    import transformers

    assert kind in TinyModels.kinds, kind

    rotary = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    if kind == "llama":
        return transformers.LlamaConfig(
            **rotary, num_key_value_heads=2, tie_word_embeddings=False, rope_parameters=llama3
        )
    if kind == "qwen2":
        return transformers.Qwen2Config(
            **rotary, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6
        )
    if kind == "qwen3":
        return transformers.Qwen3Config(
            **rotary, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True
        )
    if kind == "opt":
        return transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
        )
    if kind == "mixtral":
        return transformers.MixtralConfig(
            **rotary, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2
        )
    # Six heads: ALiBi's slopes of a count that is not a power of two.
    return transformers.BloomConfig(vocab_size=VOCAB, hidden_size=96, n_layer=LAYERS, n_head=6)


class TinyModels:
    """Makes each model once per session: its directory, and the transformers model itself."""

    kinds = ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def reference(self, kind: str) -> Any:
        """Return the transformers model in float32."""
        import torch
        import transformers

        if kind not in self._made:
            torch.set_num_threads(1)
            torch.manual_seed(len(kind))
            # Whatever mode the asking test is in: the model outlives it.
            with torch.inference_mode(False), torch.no_grad():
                model = transformers.AutoModelForCausalLM.from_config(_config(kind)).eval()
                for parameter in model.parameters():
                    noise = torch.randn_like(parameter) * (0.3 if kind in LOUD else 0.1)
                    parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
            model.save_pretrained(self._folder / kind)
            self._made[kind] = model
        return self._made[kind]

    def directory(self, kind: str) -> Path:
        """Return the directory with config.json and model.safetensors."""
        self.reference(kind)
        return self._folder / kind

    def greedy(self, kind: str, prompts: list[list[int]], max_new: int) -> list[list[int]]:
        """Return what transformers generates, one prompt at a time."""
        import torch

        def one(prompt: list[int]) -> list[int]:
            tokens = self.reference(kind).generate(
                torch.tensor([prompt]),
                max_new_tokens=max_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return tokens[0, len(prompt) :].tolist()

        return [one(prompt) for prompt in prompts]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the bundled trained model."""
    return Path(__file__).parents[1] / "examples" / "demo-7m"


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """Return a maker of seeded prompts of given lengths."""
    import random

    def make(*lengths: int, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]

    return make


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Any]:
    """Return a maker of hand-written plans over CPU stages between `splits`."""
    from llmpq.models.model_spec import ModelSpec
    from llmpq.precision import Precision
    from llmpq.runtime.launch.plans.manual_plan import manual_plan
    from llmpq.workload import Workload

    def make(model: Path, splits: tuple[int, ...] = (), *, bits: str = "w16a16", **shape: Any):
        values = {"batch": 4, "prompt_len": 32, "gen_len": 16, "dtype": "float32"} | shape
        half = min(2, values["batch"])
        return manual_plan(
            ModelSpec.from_directory(model),
            splits=splits,
            precision=Precision.parse(bits),
            prefill_microbatch=values.pop("prefill_microbatch", half),
            decode_microbatch=values.pop("decode_microbatch", half),
            model_dir=str(model),
            shares=values.pop("shares", ()),
            workload=Workload.parse_data(values, where="make_plan"),
        )

    return make


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """Start one Ray for all cluster tests; return its address for commands that join it."""
    import ray

    from llmpq.runtime.launch.on_ray.connect import ray_cluster

    with ray_cluster(None):
        yield ray.get_runtime_context().gcs_address
