"""What the devices of a stage in tensor parallel hold: of every model that is known by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.errors import BadPlanError
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.models.tensor_parallel import Member, PartSlice, apportioned
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.models.part_shapes import layer_shapes
from llmpq.sizes.memory import Quantization, StoredBytes, layer_weight_bytes, of_member
from llmpq.workload import Workload

SHARES = ((1, 1), (3, 1), (2, 1, 1), (5, 1, 1, 2, 1))


@pytest.mark.parametrize(
    ("units", "shares", "counts"),
    [
        (4, (3, 1), [3, 1]),
        (8, (2, 1, 1), [4, 2, 2]),
        (8, (6, 2), [6, 2]),
        (5, (96, 1, 1, 1, 1), [1] * 5),
        (6, (96, 1, 1, 1, 1), [2, 1, 1, 1, 1]),
        (10, (1, 1, 1), [4, 3, 3]),
        (112, (57, 43), [64, 48]),
    ],
)
def test_units_are_shared_out(units, shares, counts):
    found = apportioned(units, shares)
    assert [len(own) for own in found] == counts
    assert [unit for own in found for unit in own] == list(range(units))


def test_more_devices_than_units_are_refused():
    with pytest.raises(ValueError, match="2 units cannot be shared by 3 devices"):
        apportioned(2, (1, 1, 1))


def taken(cut: PartSlice | None, shape: tuple[int, ...]) -> tuple[list[int], range]:
    """Return the rows and columns that a device takes of a part."""
    rows = list(range(shape[0]))
    wide = range(shape[1] if len(shape) > 1 else 1)
    if cut is None:
        return rows, wide
    if cut.rows is not None:
        rows = [row for start, stop in cut.rows for row in range(start, stop)]
    return rows, wide if cut.columns is None else range(*cut.columns)


BY_FAMILY = {ModelSpec.by_name(name).family: name for name in sorted(builtin_configs())}


@pytest.mark.thin
@pytest.mark.parametrize("shares", SHARES[1::2])
@pytest.mark.parametrize("family", sorted(BY_FAMILY))
def test_devices_have_all_of_a_layer_together(family, shares):
    spec = ModelSpec.by_name(BY_FAMILY[family])
    spec = replace(spec, experts=min(2, spec.experts))  # one is as another
    members = [Member(spec=spec, shares=shares, index=i) for i in range(len(shares))]
    kinds = {spec.of_layer(i).fingerprint() + str(spec.is_windowed(i)): i for i in _all(spec)}
    for layer in kinds.values():
        whole = layer_shapes(spec.of_layer(layer))
        cuts = [member.cuts(layer) for member in members]
        parts = {part for own in cuts for part in own} & set(whole)
        for member, own in zip(members, cuts, strict=True):
            mine = layer_shapes(member.own.of_layer(layer))
            assert mine.keys() == whole.keys()
            for part, shape in whole.items():
                rows, columns = taken(own.get(part), shape)
                got = (len(rows), len(columns)) if len(shape) == 2 else (len(rows), *shape[1:])
                assert got == mine[part], (part, member.index)
        for part in parts:
            found = [taken(own.get(part), whole[part]) for own in cuts]
            if any(own.get(part, PartSlice()).columns for own in cuts):
                assert [c for _, columns in found for c in columns] == list(range(whole[part][1]))
            if not any(own.get(part, PartSlice()).zeros for own in cuts):
                assert {row for rows, _ in found for row in rows} == set(range(whole[part][0]))
    if members[0].heads is not None:
        assert [h for member in members for h in member.heads] == list(range(spec.heads))


def _all(spec: ModelSpec) -> range:
    return range(spec.num_layers)


@pytest.mark.parametrize("shares", [*SHARES, (1,) * 16, (3, 2, 1, 1, 1, 1, 1, 1, 1)])
def test_every_query_head_finds_its_own_keys(shares):
    """Groups stay whole while devices are no more than key heads; then they are cut evenly."""
    spec = ModelSpec.by_name("llama-3.1-8b")
    each = spec.heads // spec.kv_heads
    for index in range(len(shares)):
        member = Member(spec=spec, shares=shares, index=index)
        assert member.heads is not None
        kv, own = member.kv_of(spec.kv_heads), member.own
        assert own.heads % own.kv_heads == 0 and len(kv) == own.kv_heads
        for place, head in enumerate(member.heads):
            assert kv[place // (own.heads // own.kv_heads)] == head // each
        if len(shares) <= spec.kv_heads:
            assert len(set(kv)) == len(kv) == own.heads // each


def test_groups_of_inputs_stay_whole_where_the_shares_allow_it():
    spec = ModelSpec.by_name("llama-3.1-8b")
    for shares in SHARES:
        ends = [Member(spec=spec, shares=shares, index=i).channels(spec.ffn).stop for i in (0, 1)]
        assert all(end % 128 == 0 for end in ends)
    narrow = replace(spec, ffn=64)
    assert [len(Member(spec=narrow, shares=(2, 1, 1), index=i).channels(64)) for i in range(3)] == [
        32,
        16,
        16,
    ]


def test_what_cannot_be_cut_is_whole_on_every_device():
    spec = ModelSpec.by_name("llama-3.1-8b")
    few = replace(spec, heads=2, kv_heads=1, ffn=2)
    member = Member(spec=few, shares=(1, 1, 1), index=1)
    assert member.heads is None and not member.cuts_mlps
    assert member.own == few and member.cuts(0) == {}
    sparse = replace(spec, gate_sparsities=(0.9,) * spec.num_layers)
    assert not Member(spec=sparse, shares=(1, 1), index=0).cuts_mlps


def test_bytes_are_those_of_the_devices_own_model():
    spec = ModelSpec.by_name("llama-3.1-8b")
    quantization = Quantization()
    for precision in (Precision.W16A16, Precision.W8A16, Precision.W4A16, Precision.W3A16):
        each = [
            layer_weight_bytes(
                Member(spec=spec, shares=(5, 3), index=i).own, precision, quantization, 2
            )
            for i in range(2)
        ]
        whole = layer_weight_bytes(spec, precision, quantization, 2)
        norms = len(spec.layer_norms) * spec.norm_params * 2
        assert sum(each) == whole + norms
    stored = StoredBytes(layers=(0, 32), precision=Precision.W4A16, linears=(("down", 1000),))
    shared = [
        of_member(
            Quantization(stored=(stored,)), Member(spec=spec, shares=(3, 1), index=i), 2
        ).linear_bytes(
            Member(spec=spec, shares=(3, 1), index=i).own.linears()[3], Precision.W4A16, 2
        )
        for i in range(2)
    ]
    assert shared == [750, 250]


def test_outliers_are_the_last_devices_and_a_calibrated_o_is_every_devices():
    """Counted by hand: 4096 inputs of `o`, 14336 of `down`, of which the last 128 have 8 bits."""
    spec = ModelSpec.by_name("llama-3.1-8b")
    quantization = Quantization(symmetric=True, outliers=128)
    found = []
    for index in range(2):
        member = Member(spec=spec, shares=(1, 1), index=index)
        assert member.has_few_bits(128)
        own = of_member(quantization, member, 2)
        linears = {one.name: one for one in member.own.linears()}
        found.append(
            {name: own.linear_bytes(one, Precision.W4A4, 2) for name, one in linears.items()}
        )
    groups, rows = 7168 // 128, 4096
    whole_o = rows * ((4096 - 128) // 2 + 31 * 2 + 128 + 2) + 4 * 2048
    assert [one["o"] for one in found] == [whole_o, whole_o]
    assert found[0]["down"] == rows * (7168 // 2 + groups * 2)
    assert found[1]["down"] == rows * ((7168 - 128) // 2 + (groups - 1) * 2 + 128 + 2)
    narrow = Member(spec=spec, shares=(111, 1), index=1)
    assert len(narrow.channels(spec.ffn)) == 128
    assert not narrow.has_few_bits(128) and narrow.has_few_bits(127) and narrow.has_few_bits(0)


def plan_data(**changed: object) -> dict[str, object]:
    spec = ModelSpec.by_name("llama-3.1-8b")
    plan = manual_plan(spec, Workload(batch=2, prompt_len=64, gen_len=8), splits=(8,))
    data = json.loads(plan.dump_json())
    data["stages"][0] |= changed
    return data


def test_a_stage_names_its_devices_and_shares(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(plan_data(devices=["CPU-0", {"device": "b", "threads": 3}], shares=[3, 1]))
    )
    plan = Plan.load(path)
    assert [w.place.device for w in plan.workers] == ["CPU-0", "b", "CPU-1"]
    assert [(w.stage, w.member, w.leads) for w in plan.workers] == [
        (0, 0, True), (0, 1, False), (1, 0, True),
    ]  # fmt: skip
    assert [place.device_index for place in plan.places] == [0, 1, 1]
    assert [place.threads for place in plan.places] == [1, 3, 1]
    assert plan.last_leader == 2 and all(place.devices == () for place in plan.places)
    again = Plan.parse_data(json.loads(plan.dump_json()), where="again")
    assert again == plan


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"devices": ["CPU-0"], "shares": [1]}, "got 1 devices and 1 shares"),
        ({"devices": ["CPU-0", "b"], "shares": [1]}, "got 2 devices and 1 shares"),
        ({"shares": [1, 1]}, "got 0 devices and 2 shares"),
        ({"devices": ["CPU-0", "CPU-1"], "shares": [1, 1]}, "a device has more than one stage"),
        ({"devices": ["CPU-0", "b"], "shares": [1, 0]}, "stages.0.shares.1"),
    ],
)
def test_a_stage_that_cannot_be_shared_so_is_refused(tmp_path, changed, said):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data(**changed)))
    with pytest.raises(BadPlanError, match=said):
        Plan.load(path)
