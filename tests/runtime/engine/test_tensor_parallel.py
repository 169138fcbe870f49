"""Stages that several devices share, as threads: tokens are those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import llmpq
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.runtime.launch.plans.manual_plan import manual_plan, with_pool_room
from llmpq.runtime.steps.trace import LoadReport
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu
LENGTHS = (5, 18, 12)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    loads: list[LoadReport]
    """Of every device."""
    num_preempted: int


def generated(
    directory: Path, plan: Plan, prompts: list[list[int]], count: int = 12, **options: object
) -> Run:
    """Return greedy tokens of prompts."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = llmpq.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    with llmpq.LLM(str(directory), plan=plan, backend="threads", **options) as llm:
        outputs = llm.generate(given, asked)
    ended = [output.outputs[0] for output in outputs]
    preempted = sum(one.num_preemptions for one in ended)
    return Run([one.token_ids for one in ended], list(llm.engine.client.load_reports), preempted)


@pytest.mark.seldom
def test_every_family_gives_the_tokens_of_transformers(family_kind, models, random_prompts):
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    prompts = random_prompts(*LENGTHS, vocab=spec.vocab)
    splits = models.cuts(family_kind, (spec.num_layers // 2,))
    shares = ((3, 1), (2, 1, 1))[: 1 + len(splits)]
    work = Workload(batch=4, prompt_len=20, gen_len=12, dtype="float32")
    plan = manual_plan(
        spec, work, splits=splits, shares=shares, decode_microbatch=2, model_dir=str(directory)
    )
    got = generated(directory, plan, prompts)
    assert got.tokens == models.greedy(family_kind, prompts)


WIDE = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module", params=["Llama", "Mixtral"])
def wide_model(request, tmp_path_factory) -> Path:
    """Heads and MLPs of several groups of 32 inputs."""
    import transformers

    torch.manual_seed(0)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if request.param == "Mixtral" else {}
    config = getattr(transformers, f"{request.param}Config")(**WIDE, **more)
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return folder


def planned(
    directory: Path, shares=(), splits=(), *, bits="w16a16", kv="kv16", outliers=0, **work
) -> Plan:
    spec = ModelSpec.from_directory(directory)
    from llmpq.precision import KVPrecision, Precision

    given = {"batch": 4, "prompt_len": 200, "gen_len": 24, "dtype": "float32", **work}
    return manual_plan(
        spec,
        Workload(**given, kv=KVPrecision.parse(kv)),
        splits=splits,
        shares=shares,
        precision=Precision.parse(bits),
        quantization=QuantizationForm(group_size=32, outliers=outliers),
        decode_microbatch=2,
        model_dir=str(directory),
    )


@pytest.mark.thin
@pytest.mark.parametrize("kv", ["kv16", "kv8", "kv8v4", "kv4", "kv16v4"])
@pytest.mark.parametrize("bits", ["w16a16", "w8a16", "w4a16", "w3a16"])
def test_precisions_give_the_tokens_of_one_device(wide_model, random_prompts, bits, kv):
    """Groups of inputs stay whole, so devices hold the codes that one device holds."""
    prompts = random_prompts(170, 33, 90)
    one = planned(wide_model, bits=bits, kv=kv)
    alone = generated(wide_model, one, prompts)
    plan = planned(wide_model, [(3, 1)], bits=bits, kv=kv)
    shared = generated(wide_model, plan, prompts)
    same = [own == other for own, other in zip(shared.tokens, alone.tokens, strict=True)]
    # Sums in another order turn a value that lies between two codes of a packed cache.
    assert all(same) if kv == "kv16" else sum(same) >= 2
    held = [load.weights_bytes for load in shared.loads]
    pools = [load.kv_bytes for load in shared.loads]
    assert pools[0] == 3 * pools[1] and sum(pools) == alone.loads[0].kv_bytes
    assert held[1] < held[0] < alone.loads[0].weights_bytes


@pytest.mark.parametrize("outliers", [pytest.param(0, marks=pytest.mark.seldom), 8])
def test_inputs_of_4_bits_are_rounded_as_on_one_device(wide_model, random_prompts, outliers):
    """Groups and outliers of inputs are one device's, so their scales are those of one device."""
    prompts = random_prompts(70, 33, 40)
    one = planned(wide_model, bits="w4a4", outliers=outliers)
    alone = generated(wide_model, one, prompts)
    plan = planned(wide_model, [(2, 1, 1)], bits="w4a4", outliers=outliers)
    shared = generated(wide_model, plan, prompts)
    assert shared.tokens == alone.tokens
    assert all(own.weights_bytes < alone.loads[0].weights_bytes for own in shared.loads)


def scored(directory: Path, plan: Plan, prompts: list[list[int]]) -> torch.Tensor:
    """Return the log-probabilities of the prompts' tokens."""
    asked = llmpq.SamplingParams(max_tokens=0, prompt_logprobs=0)
    with llmpq.LLM(str(directory), plan=plan, backend="threads") as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    return torch.tensor(
        [
            of[token].logprob
            for answer, prompt in zip(answers, prompts, strict=True)
            for of, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
    )


@pytest.mark.parametrize("bits", [pytest.param("w8a8", marks=pytest.mark.seldom), "w4a4"])
def test_rounded_inputs_lose_no_more_than_on_one_device(wide_model, random_prompts, bits):
    """A token's part has a scale of its own, which is no coarser than the whole token's."""
    prompts = random_prompts(120, 90)
    exact = scored(wide_model, planned(wide_model), prompts)
    errors = [
        float((scored(wide_model, plan, prompts) - exact).abs().mean())
        for plan in (
            planned(wide_model, bits=bits),
            planned(wide_model, [(3, 1), (1, 1)], (1,), bits=bits),
            planned(wide_model, [(3, 2, 1, 1, 1)], bits=bits),
        )
    ]
    assert min(errors) > 0 and max(errors[1:]) < 1.15 * errors[0], errors


@pytest.mark.thin
@pytest.mark.parametrize(
    "shares",
    [
        *(pytest.param([shares], marks=pytest.mark.seldom) for shares in ((1, 1), (2, 1, 1))),
        [(3, 2, 1, 1, 1)],
    ],
)
def test_prefixes_chunks_and_preemptions(wide_model, random_prompts, shares):
    """Blocks are found, freed and computed again on every device of a stage alike."""
    trunk, *tails = random_prompts(140, 4, 60, 33)
    prompts = [*random_prompts(112, 113, 114, 115), *(trunk + tail for tail in tails)]
    one = planned(wide_model, batch=8, prompt_len=300)
    expected = generated(wide_model, one, prompts, 26).tokens
    plan = planned(wide_model, shares, batch=8, prompt_len=300)
    spec = ModelSpec.from_directory(wide_model)
    counted = with_pool_room(plan, spec, 1 << 40, share=1.0).places[0].memory
    assert counted is not None
    limit = counted.total_bytes - counted.kv_bytes * 13 // 16  # room for 4 of 24 blocks
    small = with_pool_room(plan, spec, limit, share=1.0)
    for own, options in (
        (plan, {"max_num_batched_tokens": 32}),
        (small, {"max_num_batched_tokens": 64}),
        (plan, {"enable_prefix_caching": False}),
    ):
        count = 26 if own is small else 8
        got = generated(wide_model, own, prompts, count, **options)
        assert got.tokens == [row[:count] for row in expected]
        assert (got.num_preempted > 0) == (own is small)
        for place, load in zip(own.places, got.loads, strict=True):
            memory = place.memory
            if memory is not None:
                assert load.weights_bytes == memory.weights_bytes + memory.embedding_bytes
                assert load.kv_bytes <= memory.limit_bytes


@pytest.mark.thin
@pytest.mark.parametrize(
    ("mode", "bits"),
    [
        ("ngram", "w16a16"),
        pytest.param("kv4", "w16a16", marks=pytest.mark.seldom),
        ("w4kv4", "w8a16"),
        ("qspec", "w4a16"),
    ],
)
def test_drafts_change_no_token(wide_model, random_prompts, mode, bits):
    (prompt,) = random_prompts(12)
    prompts = [prompt * 5, prompt * 3 + prompt[:4]]
    expected = generated(wide_model, planned(wide_model, bits=bits), prompts, 24).tokens
    for splits, shares in (((), [(2, 1)]), ((1,), [(1, 1), (1, 2)])):
        plan = planned(wide_model, shares, splits, bits=bits)
        got = generated(wide_model, plan, prompts, 24, speculate=mode, gamma=3)
        assert got.tokens == expected and len(got.loads) == 2 * len(shares)


def test_a_device_holds_no_more_than_its_part(wide_model):
    spec = ModelSpec.from_directory(wide_model)
    plan = planned(wide_model, [(3, 1)])
    own = [Member(spec=spec, shares=(3, 1), index=i).own for i in range(2)]
    assert [one.heads for one in own] == [6, 2] and [one.kv_heads for one in own] == [3, 1]
    assert sum(one.ffn for one in own) == spec.ffn
    assert [place.device for place in plan.places] == ["CPU-0", "CPU-1"]


def test_a_size_is_enough(wide_model, random_prompts):
    """Without a plan the CPU's cores are divided, and each device's memory is counted."""
    prompts = random_prompts(9, 40)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    asked = llmpq.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for size in (1, 2):
        how = {"tensor_parallel_size": size, "dtype": "float32", "max_num_seqs": 2}
        with llmpq.LLM(str(wide_model), backend="threads", max_model_len=256, **how) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(given, asked)])
            assert len(llm.plan.places) == size and len(llm.engine.client.load_reports) == size
            for place, load in zip(llm.plan.places, llm.engine.client.load_reports, strict=True):
                memory = place.memory
                if memory is not None:
                    assert load.weights_bytes == memory.weights_bytes + memory.embedding_bytes
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="tensor_parallel_size must be a whole number"):
        llmpq.LLM(str(wide_model), tensor_parallel_size=True)
    plan = planned(wide_model)
    sizes = {len(stage.members) for stage in plan.stages}
    for size in (1, 2, 3):
        if sizes == {size}:
            llmpq.LLM(str(wide_model), plan=plan, tensor_parallel_size=size, start=False).close()
            continue
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size} is not what plan= says"):
            llmpq.LLM(str(wide_model), plan=plan, tensor_parallel_size=size)
