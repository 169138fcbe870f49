"""Arguments of vLLM's `LLM` that ours does not have: values that change nothing, what stands for
the others. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEVICES = (
    "a model runs over all devices of this machine, or of cluster='cluster.yaml', as a plan says "
    "(plan='plan.json')"
)
_FILES = "files are read from the model's directory"
_BITS = "a checkpoint's own form is found in its files; fewer bits are a plan's (make_plan, bits=)"
_ADAPTERS = "adapters are not run: merge them into the model first"
_DRAFTS = "drafts are speculate='ngram' or another mode, with gamma="
_BOTH = (True, False)


@dataclass(frozen=True)
class _Other:
    """What stands for an argument, as a sentence, and the values that change nothing here."""

    instead: str
    neutral: tuple[Any, ...] = (None,)


VLLM_OPTIONS: Mapping[str, _Other] = {
    "tensor_parallel_size": _Other(_DEVICES, (1,)),
    "pipeline_parallel_size": _Other(_DEVICES, (1,)),
    "data_parallel_size": _Other("several engines are llmpq-dist serve --replicas N", (1,)),
    "distributed_executor_backend": _Other("how stages run is backend="),
    "device": _Other(_DEVICES, (None, "auto")),
    "trust_remote_code": _Other("no code of a model is ever run", (False,)),
    "seed": _Other("a seed is each request's: SamplingParams(seed=...)"),
    "tokenizer": _Other(_FILES),
    "tokenizer_mode": _Other(_FILES, (None, "auto")),
    "tokenizer_revision": _Other(_FILES),
    "skip_tokenizer_init": _Other("a model without tokenizer files runs on token ids", (False,)),
    "hf_config_path": _Other(_FILES),
    "hf_overrides": _Other("a model is run as its config.json says", (None, {})),
    "hf_token": _Other("the hub's token is HF_TOKEN in the environment"),
    "download_dir": _Other("models of the hub lie in its cache: set HF_HOME"),
    "config_format": _Other(_FILES, (None, "auto")),
    "quantization": _Other(_BITS),
    "enable_lora": _Other(_ADAPTERS, (None, False)),
    "max_loras": _Other(_ADAPTERS),
    "max_lora_rank": _Other(_ADAPTERS),
    "swap_space": _Other(
        "preempted requests are computed again or copied by themselves", (None, 0)
    ),
    "cpu_offload_gb": _Other("layers run on the CPU instead: cluster= or plan=", (None, 0)),
    "kv_cache_memory_bytes": _Other("memory that is used is gpu_memory_utilization="),
    "block_size": _Other("a block of the KV cache has 128 tokens", (None, 128)),
    "enable_chunked_prefill": _Other("long prompts are always prefilled in chunks", (None, True)),
    "disable_sliding_window": _Other("windows are the model's", (None, False)),
    "max_seq_len_to_capture": _Other("graphs are captured for every length"),
    "disable_log_stats": _Other("counters are LLM.stats()", (None, *_BOTH)),
    "disable_custom_all_reduce": _Other(_DEVICES, (None, *_BOTH)),
    "use_v2_block_manager": _Other("there is one block manager", (None, *_BOTH)),
    "compilation_config": _Other("no graphs are enforce_eager=True"),
    "speculative_config": _Other(_DRAFTS),
    "speculative_model": _Other(_DRAFTS),
    "num_speculative_tokens": _Other(_DRAFTS),
    "guided_decoding_backend": _Other("guides are llguidance's", (None, "auto", "guidance")),
    "structured_outputs_config": _Other("guides are llguidance's"),
    "limit_mm_per_prompt": _Other("models read text only", (None, {})),
    "mm_processor_kwargs": _Other("models read text only"),
    "task": _Other("a model generates text", (None, "auto", "generate")),
    "runner": _Other("a model generates text", (None, "auto", "generate")),
    "convert": _Other("a model generates text", (None, "auto", "none")),
    "served_model_name": _Other("names of a server are llmpq-dist serve --served-model-name"),
    "max_logprobs": _Other("up to 100 logprobs may be asked for"),
    "override_generation_config": _Other("answers are sampled by SamplingParams", (None, {})),
}


def without_neutral(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without those of vLLM whose values change nothing.

    `TypeError` for another value says what stands for it.
    """
    left = {}
    for name, value in given.items():
        other = VLLM_OPTIONS.get(name)
        if other is None:
            left[name] = value
        elif not any(type(value) is type(known) and value == known for known in other.neutral):
            raise TypeError(f"LLM has no option '{name}' (got {value!r:.60}): {other.instead}")
    return left
