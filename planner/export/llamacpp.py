"""llama.cpp: convert, quantise and serve commands; layers per device, bits per layer.

llama.cpp hands layers to devices in order. With n of the layers and the output matrix on GPUs
(`-ngl`), the CPU of the main host has the first ones; the GPUs share the others in proportion to
`--tensor-split`, the output counted as one more layer at the end. Layers that the CPU has behind a
GPU's are assigned to that GPU, and their weights are kept in host memory by `--override-tensor`,
so that the CPU multiplies by them; their KV cache stays with the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.devices.device_spec import device_specs
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export.gguf_memory import (
    WIDE_BLOCK,
    GgufTypes,
    GpuShare,
    memory_lines,
)
from llmpq.planner.export.gpu_stages import numbers_line
from llmpq.planner.export.result import (
    Exported,
    by_precision,
    context_length,
    drafts_line,
    emulated_line,
    engine_flags,
    microbatch_line,
    model_id,
    numbers_pattern,
    quoted,
    ranges,
    said,
    step_tokens,
)
from llmpq.plans.plan import Plan, StagePlan
from llmpq.precision import KVPrecision, Precision

PORT = 50052
"""Where rpc-server listens, by default."""
PCI_ORDER = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
"""Numbers GPUs as nvidia-smi does; by default CUDA begins with the fastest."""
BACKENDS = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "SYCL", "Apple": "MTL"}
"""What llama.cpp calls a maker's GPUs, a number behind it."""
GGUF_TYPES = {
    Precision.W8A16: "q8_0",
    Precision.W8A8: "q8_0",
    Precision.W4A16: "q4_k",
    Precision.W4A4: "q4_k",
    Precision.W3A16: "q3_k",
}
NARROW_TYPES = {
    Precision.W8A16: "q8_0",
    Precision.W8A8: "q8_0",
    Precision.W4A16: "q4_0",
    Precision.W4A4: "q4_0",
    Precision.W3A16: "q4_0",
}
"""Types of blocks of 32, for rows that are not whole blocks of 256."""
_KEPT_BITS = {Precision.W8A16, Precision.W4A16}
"""Precisions at which layers keep the MXFP4 codes that their checkpoint has."""
GGUF_FILES = {"q8_0": "Q8_0", "q4_k": "Q4_K_S", "q3_k": "Q3_K_S", "q4_0": "Q4_0"}
"""A tensor type -> the file type that llama-quantize takes as its last word."""
UNDIVIDED = {
    *("bamba", "deepseek", "deepseek_v32", "falcon_h1", "gemma3n", "glm4_moe_lite", "glm_moe_dsa"),
    *("granite4", "kimi_linear", "minicpm3", "minimax", "minimax_m2", "mistral4", "nemotron_h"),
    *("olmo2", "olmoe", "youtu"),
}
"""Families that it does not divide by `--split-mode tensor` (llm_arch_supports_sm_tensor of the
version in engine_flags.yaml)."""
CACHE_TYPES = {16: "f16", 8: "q8_0", 4: "q4_0", 2: "q4_0"}
"""Bits of keys, or of values -> their type."""
PLAIN_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Layers by device as llama.cpp's flags say it."""

    gpus: list[StagePlan]
    split: list[int]
    """Layers of each GPU, those kept in host memory and the output matrix included."""
    mode: str = "layer"
    """`tensor`: every layer is divided among the GPUs, by `split`."""
    hosted: list[int]
    """Layers assigned to a GPU whose weights stay in host memory."""
    output_hosted: bool


def llamacpp(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the commands that make a GGUF file of the plan's precisions and serve it."""
    if spec.family == "opt":
        raise ValueError("llama.cpp has no OPT models; export with --to vllm, sglang or accelerate")
    main = _main_node(plan)
    place = _placement(plan)
    if place.mode == "tensor" and spec.family in UNDIVIDED:
        raise ValueError(
            f"llama.cpp does not divide layers of {spec.name} ({spec.family}) among GPUs "
            "(--split-mode tensor); plan with --tensor-parallel 1, or export with --to vllm or "
            "sglang"
        )
    plain = PLAIN_TYPES[plan.workload.dtype]
    made, model = _made_file(plan, spec, plain)
    types = _file_types(plan, spec, plain)
    memory, lack = None, None
    if place.mode == "layer" and made:
        memory, lack = memory_lines(plan, spec, _shares(plan, place), types)
    lines = [
        f"# llama.cpp ({engine_flags()['llamacpp']['version']}), on {main}: "
        + ", ".join(
            f"{'+'.join(s.device_names)} layers {s.layers[0]}-{s.layers[1] - 1}"
            for s in plan.stages
        ),
        *made,
    ]
    lines += [memory] if memory is not None else []
    remote = [s for s in place.gpus if s.node != main]
    for node in dict.fromkeys(stage.node for stage in remote):
        names = ",".join(_own_name(s) for s in remote if s.node == node)
        lines.append(f"# on {node}")
        lines += _order(remote, node)
        lines.append(f"rpc-server --host 0.0.0.0 --port {PORT} --device {names}")
    lines += [f"# on {main}"] if remote else []
    lines += _order(place.gpus, main)
    lines.append(_serve(plan, place, model, main))
    return Exported(
        text="\n".join(lines) + "\n",
        not_expressed=_missing(plan, place, own_file=not made),
        warnings=said(lack),
        files=tuple(made),
    )


def _order(gpus: list[StagePlan], node: str) -> list[str]:
    """Return the word that numbers a node's NVIDIA GPUs as nvidia-smi does, where it has some."""
    own = [_own_name(stage) for stage in gpus if stage.node == node]
    return [PCI_ORDER] if any(name.startswith("CUDA") for name in own) else []


def _shares(plan: Plan, place: LayerSplit) -> list[GpuShare]:
    """Return what each GPU has of the plan."""
    shares = []
    for stage in place.gpus:
        end = stage.layers[1]
        while end in place.hosted:
            end += 1
        last = end == plan.model.num_layers and not place.output_hosted
        shares.append(GpuShare(stage=stage, kv_layers=range(stage.layers[0], end), has_output=last))
    return shares


def _main_node(plan: Plan) -> str:
    """Return the node that llama-server runs on: the one whose CPU has layers, else the first's."""
    nodes = list(dict.fromkeys(stage.node for stage in plan.stages if stage.is_cpu))
    if len(nodes) > 1:
        raise ValueError(
            f"llama.cpp computes on the CPU of one host, the plan on those of {', '.join(nodes)}; "
            "plan with the CPU of one of them"
        )
    return nodes[0] if nodes else plan.stages[0].node


def _placement(plan: Plan) -> LayerSplit:
    shared = [stage for stage in plan.stages if stage.shares]
    if shared:
        return _divided(plan, shared[0])
    gpus = [stage for stage in plan.stages if not stage.is_cpu]
    split: list[int] = []
    hosted: list[int] = []
    for stage in plan.stages:
        if not stage.is_cpu:
            split.append(stage.num_layers)
        elif split:
            split[-1] += stage.num_layers
            hosted += range(*stage.layers)
    if split:
        split[-1] += 1  # the output matrix
    return LayerSplit(
        gpus=gpus,
        split=split,
        hosted=hosted,
        output_hosted=bool(split) and plan.stages[-1].is_cpu,
    )


def _divided(plan: Plan, shared: StagePlan) -> LayerSplit:
    """Return every layer divided among the GPUs of the plan's one stage."""
    if len(plan.stages) > 1 or shared.is_cpu:
        raise ValueError(
            "llama.cpp divides all layers among the same GPUs (--split-mode tensor) or none, stage "
            f"{shared.device} is {'a CPU' if shared.is_cpu else 'one of several'}; plan with "
            "--tensor-parallel for all GPUs, or with --tensor-parallel 1 without"
        )
    return LayerSplit(
        gpus=list(shared.members),
        split=list(shared.shares),
        mode="tensor",
        hosted=[],
        output_hosted=False,
    )


def _made_file(plan: Plan, spec: ModelSpec, plain: str) -> tuple[list[str], str]:
    """Return the commands that make a GGUF file, and the file; none of a plan of such a file."""
    own = plan.model.path
    if own and is_gguf(own):
        return [], quoted(str(open_gguf(own).path))
    quantise, model = _quantise(plan, spec, plain)
    return [_convert(plan, plain), *quantise], model


def _convert(plan: Plan, plain: str) -> str:
    remote = "" if plan.model.path else " --remote"
    model = quoted(model_id(plan))
    return (
        f"python convert_hf_to_gguf.py {model}{remote} --outtype {plain} "
        f"--outfile model-{plain}.gguf"
    )


def _as_published(plan: Plan, spec: ModelSpec) -> bool:
    """Whether layers keep the codes in which the family's checkpoints are published."""
    return FAMILIES[spec.family].published_as is not None and set(by_precision(plan)) <= _KEPT_BITS


def _file_types(plan: Plan, spec: ModelSpec, plain: str) -> GgufTypes:
    """Return the types of the file that is served, and of the cache."""
    own = GGUF_TYPES if spec.hidden % WIDE_BLOCK == 0 else NARROW_TYPES
    types = {Precision.W16A16: plain, **own}
    kv = plan.workload.kv
    cache = (CACHE_TYPES[kv.key_bits], CACHE_TYPES[kv.value_bits])
    published = FAMILIES[spec.family].published_as
    if published is not None and _as_published(plan, spec):
        of_experts = dict.fromkeys(types, published)
        return GgufTypes(
            types=dict.fromkeys(types, plain), experts=of_experts, output=plain, cache=cache
        )
    head = plan.settings().head(on_cpu=plan.stages[-1].is_cpu)
    return GgufTypes(types=types, experts=types, output=types[head], cache=cache)


def _quantise(plan: Plan, spec: ModelSpec, plain: str) -> tuple[list[str], str]:
    """Return the command, if any layer is quantised, and the file that is served.

    A file of a checkpoint that is published in codes that layers of 4 and 8 bits keep has them
    already.

    The file's own type must be a quantised one, or llama-quantize heeds no `--tensor-type`; every
    layer is named, or it mixes types of its own choice.
    """
    table = by_precision(plan)
    quantised = [precision for precision in table if precision is not Precision.W16A16]
    if not quantised or _as_published(plan, spec):
        return [], f"model-{plain}.gguf"
    types_of = GGUF_TYPES if spec.hidden % WIDE_BLOCK == 0 else NARROW_TYPES
    base = types_of[max(quantised, key=lambda p: len(table[p]))]
    types = [
        f"--tensor-type 'blk\\.{numbers_pattern(layers, plan.model.num_layers)}\\..*="
        f"{types_of.get(p, plain)}'"
        for p, layers in table.items()
    ]
    head = _file_types(plan, spec, plain).output
    # Else the file's type decides: an output of 6 bits beside layers of 4. A tied one is the
    # embedding.
    embedding = head if spec.tied_embeddings else plain
    types += [f"--output-tensor-type {head}", f"--token-embedding-type {embedding}"]
    words = ["llama-quantize", *types, f"model-{plain}.gguf", "model-plan.gguf", GGUF_FILES[base]]
    return [" ".join(words)], "model-plan.gguf"


def _serve(plan: Plan, place: LayerSplit, model: str, main: str) -> str:
    divided = place.mode == "tensor"
    layers = plan.model.num_layers + 1 if divided else sum(place.split)
    words = ["llama-server", "-m", model, "-ngl", str(layers)]
    remote = [s for s in place.gpus if s.node != main]
    if remote:
        named = {node.name: node.host for node in plan.nodes}
        hosts = dict.fromkeys(f"{named.get(s.node) or s.node}:{PORT}" for s in remote)
        words += ["--rpc", ",".join(hosts)]
    words += ["--device", ",".join(_names(place.gpus, main)) or "none"]
    if len(place.gpus) > 1:
        words += ["--split-mode", place.mode, "--tensor-split", ",".join(map(str, place.split))]
    if place.hosted:
        patterns = [f"blk\\.({'|'.join(map(str, place.hosted))})\\.=CPU"]
        patterns += ["^output=CPU"] if place.output_hosted else []
        words += ["--override-tensor", f"'{','.join(patterns)}'"]
    threads = next((s.threads for s in plan.stages if s.is_cpu and s.threads), None)
    if threads is not None:
        words += ["--threads", str(threads)]
    cached = plan.workload.batch * (plan.workload.max_len + 1)
    words += ["--ctx-size", str(max(cached, context_length(plan)))]
    words += ["--parallel", str(plan.workload.batch)]
    if (step := step_tokens(plan)) is not None:
        # Unified, else every slot has its part, and that of a mean request.
        words += ["--kv-unified", "--batch-size", str(step)]
    kv = plan.workload.kv
    packed = kv is not KVPrecision.KV16
    words += ["--flash-attn", "on"] if divided or packed else []
    if packed:
        keys, values = CACHE_TYPES[kv.key_bits], CACHE_TYPES[kv.value_bits]
        words += ["--cache-type-k", keys, "--cache-type-v", values]
    return " ".join(words)


def _names(gpus: list[StagePlan], main: str) -> list[str]:
    """Return what llama-server calls the GPUs; those behind RPC are numbered as they are listed."""
    remote = [s for s in gpus if s.node != main]
    hosts = list(dict.fromkeys(s.node for s in remote))
    listed = [s.device for host in hosts for s in remote if s.node == host]
    return [
        _own_name(stage) if stage.node == main else f"RPC{listed.index(stage.device)}"
        for stage in gpus
    ]


def _own_name(stage: StagePlan) -> str:
    """Return what llama.cpp calls a GPU on its own host (`--list-devices`)."""
    spec = device_specs().get(stage.kind)
    maker = "NVIDIA" if spec is None else spec.maker
    return f"{BACKENDS[maker]}{stage.device_index}"


def _missing(plan: Plan, place: LayerSplit, *, own_file: bool) -> tuple[str, ...]:
    table = by_precision(plan)
    rounded = [
        f"activation bits of {precision.value} on layers {ranges(table[precision])}: weights only"
        for precision in (Precision.W8A8, Precision.W4A4)
        if precision in table
    ]
    quantised, kv = set(table) != {Precision.W16A16}, plan.workload.kv
    return said(
        numbers_line(plan),
        microbatch_line(plan),
        drafts_line(plan),
        f"KV cache of {kv.title}: the closest to 2 bits is q4_0" if kv.value_bits == 2 else None,
        *rounded,
        "bits: the plan's GGUF file is served as it is, in its own types" if own_file else None,
        "block sizes: GGUF types have blocks of 32 or 256, not the plan's groups"
        if quantised and not own_file
        else None,
        f"KV cache of layers {ranges(place.hosted)} in host memory: llama.cpp keeps it on the GPU "
        "of the layers before them"
        if place.hosted
        else None,
        "the same heads on each GPU: llama.cpp cuts by --tensor-split in units of its own"
        if place.mode == "tensor"
        else None,
        emulated_line(plan),
    )
