"""Flags of vLLM, of llmpq-algo and of earlier versions, with what stands for them in a command."""

from __future__ import annotations

from collections.abc import Mapping

from llmpq.commands.command_line import Idle

_DEVICES = (
    "a model runs over all devices of this machine; choose others with CUDA_VISIBLE_DEVICES, or "
    "plan for them: llmpq-algo --devices"
)
_BITS = "a checkpoint's own form is found in its files; for fewer bits plan with llmpq-algo --bits"
_LENGTH = "lengths are each request's own; a plan's are llmpq-algo --prompt-len and --gen-len"
_FILES = "files are read from the model's directory: leave it out"

VLLM_FLAGS: Mapping[str, str] = {
    "--tensor-parallel-size": _DEVICES,
    "-tp": _DEVICES,
    "--pipeline-parallel-size": _DEVICES,
    "-pp": _DEVICES,
    "--data-parallel-size": "several engines: llmpq-dist serve --replicas N",
    "-dp": "several engines: llmpq-dist serve --replicas N",
    "--ray-serve": "replicas are processes of this machine: leave it out, --replicas N is enough",
    "--distributed-executor-backend": "how stages run is --backend",
    "--max-model-len": _LENGTH,
    "--max-seq-len": _LENGTH,
    "--max-num-seqs": "requests at once are the plan's: llmpq-algo --batch",
    "--max-num-batched-tokens": "a step's tokens are the plan's",
    "--dtype": "the dtype is the plan's: llmpq-algo --dtype",
    "--quantization": _BITS,
    "-q": _BITS,
    "--load-format": _BITS,
    "--gpu-memory-utilization": "the memory used is the plan's: llmpq-algo has the flag",
    "--kv-cache-memory-bytes": "memory that is left free is the plan's: llmpq-algo --reserve",
    "--cpu-offload-gb": "layers run on the CPU instead: llmpq-algo --devices 4090,cpu",
    "--enforce-eager": "leave it out; llmpq-dist bench has it",
    "--tokenizer": _FILES,
    "--hf-config-path": _FILES,
    "--download-dir": "models of the hub lie in its cache: set HF_HOME",
    "--tokenizer-mode": _FILES,
    "--block-size": "a block of the KV cache has 128 tokens: leave it out",
    "--no-enable-prefix-caching": "llmpq-dist serve has it",
    "--max-tokens": "answers' lengths are the requests' own",
    "--speculative-config": "drafts are --speculate MODE with --gamma N",
    "--speculative-model": "drafts are --speculate MODE with --gamma N",
    "--num-speculative-tokens": "drafts are --speculate MODE with --gamma N",
    "--seed": "a seed is each request's own",
    "--max-logprobs": "a request may ask for as many as the API allows: leave it out",
    "--api-server-count": "one process answers HTTP: leave it out; several engines: --replicas N",
    "--uvicorn-log-level": "llmpq-dist serve has --no-access-log",
    "--chat-template-content-format": "contents go to a template as texts: leave it out",
    "--default-chat-template-kwargs": "requests say them: chat_template_kwargs of a body",
    "-m": "the model is --model DIR, or a plan --plan FILE",
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "-ngl": _DEVICES,
    "--disable-uvicorn-access-log": "llmpq-dist serve has --no-access-log",
    "--enable-lora": "adapters are not run: merge them into the model first",
    "--lora-modules": "adapters are not run: merge them into the model first",
    "--num-prompts": "requests of a bench are --batch",
    "--input-len": "tokens of a bench's prompts are --prompt",
    "--output-len": "new tokens of a bench are --gen",
    "--batch-size": "requests of a bench are --batch",
}
"""Flag of vLLM -> what stands for it here, as the end of a sentence."""

_ONE = ("1",)
IDLE_FLAGS: Mapping[str, Idle] = {
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        Idle("the plan says which devices run the model", _ONE),
    ),
    **dict.fromkeys(("--data-parallel-size", "-dp"), Idle("one engine is the default", _ONE)),
    "--enable-prefix-caching": Idle("it is on"),
    "--enable-chunked-prefill": Idle("it is on"),
    "--enable-auto-tool-choice": Idle("tools are on wherever the model's template has them"),
    "--enable-reasoning": Idle("thoughts leave apart from the text by themselves"),
    "--trust-remote-code": Idle("no code of a model is ever run"),
    "--disable-log-requests": Idle("prompts are not logged unless --log-prompts asks"),
    "--no-enable-log-requests": Idle("prompts are not logged unless --log-prompts asks"),
    "--disable-log-stats": Idle("counters are at /metrics, not in the log"),
    "--swap-space": Idle("preempted requests are computed again or copied by themselves", None),
    "--seed": Idle("a seed is each request's own", ("0", "None")),
    "--load-format": Idle("a checkpoint's form is found in its files", ("auto", "safetensors")),
    "--tokenizer-mode": Idle("it is found in the model's files", ("auto", "hf")),
}
"""Flags of vLLM that ask for what is so here anyway: charts and scripts have them fixed."""

_POOL = "KV is always in a pool of blocks: leave it out"
_DEADLINE = "it is --deadlines NAME=S of wait_nodes, placement, load, stall and step"
FORMER_FLAGS: Mapping[str, str] = {
    "--kv-pool": _POOL,
    "--no-kv-pool": _POOL,
    "--in-process": "it is --backend threads",
    "--no-graphs": "it is --enforce-eager",
    "--no-auto": "it is --ray-address auto",
    "--no-prefix-cache": "it is --no-enable-prefix-caching",
    "--wait-nodes": _DEADLINE,
    "--placement-timeout": _DEADLINE,
    "--load-timeout": _DEADLINE,
    "--stall-timeout": _DEADLINE,
    "--step-timeout": _DEADLINE,
}
"""Flags that earlier versions had -> what stands for them now."""

_PLANNING = [
    "batch",
    "bits",
    "context",
    "costs",
    "cpu-activations",
    "decode-microbatch",
    "dtype",
    "engines",
    "explain",
    "gen-len",
    "group",
    "head-bits",
    "max-devices",
    "method",
    "objective",
    "omega-file",
    "outliers",
    "pareto",
    "pin",
    "prefer",
    "prefill-microbatch",
    "prompt-len",
    "quality-budget",
    "reserve",
    "solver",
    "symmetric",
    "theta",
    "time-limit",
    "weight-group-size",
    "what-if",
]

PLAN_FLAGS: Mapping[str, str] = {
    **{
        f"--{name}": f"plans are made with it: llmpq-algo --{name} ... -o plan.json, then --plan "
        "plan.json here"
        for name in _PLANNING
    },
    "--devices": _DEVICES,
    "--kv": "the bits of the KV cache are --kv-cache-dtype",
}
"""Flags of llmpq-algo -> what to do with them."""

OTHER_FLAGS: Mapping[str, str] = {**PLAN_FLAGS, **VLLM_FLAGS, **FORMER_FLAGS}
"""All of these, for a command that runs a model."""
