"""What stands for flags of vLLM, or of earlier versions, that a command does not have."""

from __future__ import annotations

from collections.abc import Mapping

_DEVICES = (
    "a model runs over all devices of this machine; choose others with CUDA_VISIBLE_DEVICES, or "
    "plan for them: llmpq-algo --devices"
)
_BITS = "a checkpoint's own form is found in its files; for fewer bits plan with llmpq-algo --bits"
_LENGTH = "lengths are each request's own; a plan's are llmpq-algo --prompt-len and --gen-len"
_TOOLS = "tools are on wherever the model's template has them: leave it out"
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
    "--swap-space": "preempted requests are computed again or copied by themselves: leave it out",
    "--cpu-offload-gb": "layers run on the CPU instead: llmpq-algo --devices 4090,cpu",
    "--enforce-eager": "leave it out; llmpq-dist bench has it",
    "--trust-remote-code": "no code of a model is ever run: leave it out",
    "--tokenizer": _FILES,
    "--hf-config-path": _FILES,
    "--download-dir": "models of the hub lie in its cache: set HF_HOME",
    "--tokenizer-mode": _FILES,
    "--block-size": "a block of the KV cache has 128 tokens: leave it out",
    "--enable-prefix-caching": "it is on: leave it out",
    "--no-enable-prefix-caching": "llmpq-dist serve has it",
    "--enable-chunked-prefill": "it is on: leave it out",
    "--max-tokens": "answers' lengths are the requests' own",
    "--speculative-config": "drafts are --speculate MODE with --gamma N",
    "--speculative-model": "drafts are --speculate MODE with --gamma N",
    "--num-speculative-tokens": "drafts are --speculate MODE with --gamma N",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-reasoning": "thoughts leave apart from the text by themselves: leave it out",
    "--disable-log-requests": "llmpq-dist serve has --no-access-log",
    "--disable-log-stats": "leave it out; counters are at /metrics",
    "--disable-uvicorn-access-log": "llmpq-dist serve has --no-access-log",
    "--enable-lora": "adapters are not run: merge them into the model first",
    "--lora-modules": "adapters are not run: merge them into the model first",
    "--num-prompts": "requests of a bench are --batch",
    "--input-len": "tokens of a bench's prompts are --prompt",
    "--output-len": "new tokens of a bench are --gen",
    "--batch-size": "requests of a bench are --batch",
}
"""Flag of vLLM -> what stands for it here, as the end of a sentence."""

_POOL = "KV is in a pool of blocks wherever its kernels serve the run: leave it out"
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
