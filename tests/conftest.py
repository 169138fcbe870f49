"""What all tests share: tiers, seeds, the interpreter, and tiny random models of every family."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

ALL = "LLMPQ_ALL_TESTS" in os.environ
"""Whether every drawn problem is tried, at every level of a CPU's instructions: `make test-all`."""
if not ALL:
    # Code for one level of a CPU's instructions takes 12 s of a core, not 24; commands have it too.
    os.environ.setdefault("LLMPQ_NATIVE_OPTIMISED", "-O2")
VOCAB, HIDDEN, LAYERS, POSITIONS = 199, 64, 3, 128
ALONE = {
    "quick": ("pure", "quick"),
    **{name: (name,) for name in ("interpret", "compile", "cluster", "hosts_long")},
}
"""What `-m` may ask for alone, and the marks that a file of it has."""
APART = frozenset((*ALONE, "hosts")) - {"quick"}
"""Tiers that are asked for alone: a file of nothing else has no test of another."""
LONGEST = (
    "exact/test_exact.py", "front/test_front.py", "cli/test_eval_command.py",
    "engine/test_window_pools.py", "replicas/test_replicas.py", "cli/test_dist_errors.py",
    "exact/test_deadline.py", "tests/test_readme.py", "hosts/test_how_to.py",
    "on_ray/test_own_ray.py", "launch/test_engine_parity.py", "hosts/test_placement.py",
    "backends/test_cuda_paged_interpret.py", "backends/test_cuda_speculate_interpret.py",
    "low_bit/test_latent_codes_compile.py", "paged/test_packed_pages_compile.py",
)  # fmt: skip
"""Files whose tests take longest, the longest first."""


@pytest.fixture(scope="session")
def seeds() -> Callable[[Sequence[int]], Sequence[int]]:
    """Every third of the seeds of a test, a dozen of many; or all of them."""
    return lambda whole: whole[:: 1 if ALL else max(3, len(whole) // 12)]


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Triton's interpreter, rounding as a GPU rounds, and without what only costs time.

    By itself it cuts the lower bits of bfloat16 off, twice the error, all of it towards zero: the
    tests' limits are those of rounding. It also adds every sum a second time in 64 bits, to see
    whether 32 hold it (a fifth of the time), and makes the language its own anew for each function
    that a kernel calls (a sixth).
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_cast, plain_patch = builder.cast_impl, interpreter._patch_lang
    scope_class = interpreter._LangPatchScope
    plain_restore = scope_class.restore
    patched: set[tuple[bool, bool]] = set()
    keys: dict[Any, tuple[bool, bool]] = {}

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, src, dst_type)
        values = np.ascontiguousarray(src.data, dtype=np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        kept = np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
        return interpreter.TensorHandle(kept, dst_type.scalar)

    def patch_lang(fn: Any) -> Any:
        """Nothing where what `fn` calls the language is patched already, by its kernel's launch."""
        key = keys.get(fn)
        if key is None:
            seen = [v for v in fn.__globals__.values() if inspect.ismodule(v)]
            key = keys[fn] = (any(v is tl for v in seen), any(v is tl.core for v in seen))
        if key in patched:
            return scope_class()
        scope = plain_patch(fn)
        patched.add(key)
        return scope

    def restore(self: Any) -> None:
        patched.clear()
        plain_restore(self)

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        _remember_types(patch)
        patch.setattr(builder, "cast_impl", cast_impl)
        patch.setattr(interpreter, "_patch_lang", patch_lang)
        patch.setattr(scope_class, "restore", restore)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


def _remember_types(patch: pytest.MonkeyPatch) -> None:
    """Have types of the language made once, not at every operation: half of the interpreter's time.

    Blocks of one shape and element share what they are made of, as do tensors of one type.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    core, semantic = tl.core, tl.semantic.TritonSemantic
    plain_block, plain_tensor = core.block_type.__init__, core.tensor.__init__
    plain_unwrap, plain_broadcast = core._unwrap_if_constexpr, semantic.broadcast_impl_value
    plain_numpy = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *(s if type(s) is int else s.value for s in shape))
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = self.__dict__  # holds the element: its id stays its own
        self.__dict__ = blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        made = type.__dict__.get("made_tensor")
        if made is None:
            plain_tensor(self, handle, type)
            own = self.__dict__.items()
            type.made_tensor = {k: v for k, v in own if k not in ("handle", "type")}
        else:
            self.__dict__.update(made)
            self.handle, self.type = handle, type

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value
        return value.value if kind is tl.constexpr else plain_unwrap(value)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        mine, other = lhs.type, rhs.type
        if mine.is_block() and other.is_block() and mine.shape.values == other.shape.values:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    def numpy_type(kind: Any) -> Any:
        if "numpy_type" not in kind.__dict__:
            kind.numpy_type = plain_numpy(kind)
        return kind.numpy_type

    patch.setattr(core.block_type, "__init__", make_block)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap)
    patch.setattr(semantic, "broadcast_impl_value", broadcast)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)


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
    if ALL:
        return
    left_out = {item for item in items if item.get_closest_marker("seldom")}
    thin: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thin") and hasattr(item, "callspec") and item not in left_out:
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
    that one `parametrize` lists together count as one, unless told `apart=True`.
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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count as quick what is pure and not slow."""
    if item.get_closest_marker("pure") and not item.get_closest_marker("slow"):
        item.add_marker("quick")


def _config(kind: str) -> Any:
    """Return a transformers config: shapes that differ where mistakes hide."""
    import transformers

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
                    noise = torch.randn_like(parameter) * 0.1
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
    from llmpq.model_spec import ModelSpec
    from llmpq.precision import Precision
    from llmpq.runtime.launch.plans.hand_plan import hand_plan
    from llmpq.workload import Workload

    def make(model: Path, splits: tuple[int, ...] = (), *, bits: str = "w16a16", **shape: Any):
        values = {"batch": 4, "prompt_len": 32, "gen_len": 16, "dtype": "float32"} | shape
        half = min(2, values["batch"])
        return hand_plan(
            ModelSpec.from_directory(model),
            splits=splits,
            precision=Precision.parse(bits),
            prefill_microbatch=values.pop("prefill_microbatch", half),
            decode_microbatch=values.pop("decode_microbatch", half),
            model_dir=str(model),
            workload=Workload.parse_data(values, where="make_plan"),
        )

    return make


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """Start one Ray for all cluster tests; return its address for commands that join it."""
    import ray

    from llmpq.runtime.launch.on_ray.placement import ray_cluster

    with ray_cluster(None):
        yield ray.get_runtime_context().gcs_address
