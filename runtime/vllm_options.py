"""Arguments and methods of vLLM's `LLM` and `SamplingParams` that ours do not have: values that
change nothing, what stands for the others. Standard library only.
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


_BEAMS = "there is no beam search: ask for n answers and choose by cumulative_logprob"
_PLAIN = "a template gets texts as texts"
VLLM_SAMPLING: Mapping[str, _Other] = {
    "detokenize": _Other("answers have their text and token_ids", (True, None)),
    "spaces_between_special_tokens": _Other("tokens are joined as the tokenizer joins them", _BOTH),
    "output_kind": _Other("LLM.stream has what is new, LLM.generate whole answers"),
    "extra_args": _Other("there are no plugins that would read them", (None, {})),
    "logits_processors": _Other(
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs", (None, [])
    ),
    "guided_decoding": _Other("it is structured_outputs=StructuredOutputsParams(...)"),
    "best_of": _Other("ask for n answers and choose by cumulative_logprob", (None, 1)),
    "use_beam_search": _Other(_BEAMS, (False, None)),
    "length_penalty": _Other(_BEAMS, (1.0, 1, None)),
    "early_stopping": _Other(_BEAMS, (False, None)),
    "flat_logprobs": _Other("logprobs are a dict a token", (False, None)),
    "skip_clone": _Other("parameters are values that nothing changes", (None, *_BOTH)),
    "skip_reading_prefix_cache": _Other(
        "a cache_salt of its own keeps a request from found prefixes", (None, False)
    ),
    "repetition_detection": _Other("use repetition_penalty or frequency_penalty"),
}
VLLM_CALLS: Mapping[str, _Other] = {
    "lora_request": _Other(_ADAPTERS),
    "prompt_token_ids": _Other("token ids are prompts: {'prompt_token_ids': [...]}, or the list"),
    "tokenization_kwargs": _Other(
        "texts are tokenised as the model's files say; truncate_prompt_tokens is in SamplingParams",
        (None, {}),
    ),
    "guided_options_request": _Other("it is SamplingParams(structured_outputs=...)"),
    "chat_template_content_format": _Other(_PLAIN, (None, "auto", "string")),
    "mm_processor_kwargs": _Other("models read text only", (None, {})),
    "mm_encoder_kwargs": _Other("models read text only", (None, {})),
}
"""Of `LLM.generate` and `LLM.chat`."""
_ONE_PROCESS = "stages are the plan's (LLM.plan), and run no code of a caller's"
_TEXT_ONLY = "models generate text here"
_ASLEEP = "weights stay where they are: close the LLM, and make it again (layer_cache= is quick)"
VLLM_METHODS: Mapping[str, str] = {
    "beam_search": _BEAMS,
    "encode": _TEXT_ONLY,
    "embed": _TEXT_ONLY,
    "classify": _TEXT_ONLY,
    "reward": _TEXT_ONLY,
    "score": "a text's scores are SamplingParams(max_tokens=0, prompt_logprobs=0)",
    "apply_model": _ONE_PROCESS,
    "collective_rpc": _ONE_PROCESS,
    "get_world_size": _ONE_PROCESS,
    "llm_engine": "stream, submit, abort and stats are LLM's own methods",
    "enqueue": "it is submit, or as_completed",
    "wait_for_completion": "it is as_completed",
    "from_engine_args": "its arguments are LLM's: LLM(model, max_model_len=...)",
    "set_tokenizer": "files are read from the model's directory",
    "preprocess_chat": "LLM.get_tokenizer().apply_chat_template makes the prompt",
    "start_profile": "LLM(trace='trace.json') writes what stages did, as a Chrome trace",
    "stop_profile": "LLM(trace='trace.json') writes what stages did, as a Chrome trace",
    "reset_prefix_cache": "blocks are dropped as others need them; requests of another cache_salt "
    "find none of them, and enable_prefix_caching=False keeps none",
    "reset_mm_cache": "models read text only",
    "get_metrics": "counters are LLM.stats(); llmpq-dist serve has /metrics",
    "sleep": _ASLEEP,
    "wake_up": _ASLEEP,
}
"""Attribute of vLLM's `LLM` -> what stands for it."""


def without_neutral(
    given: Mapping[str, Any],
    table: Mapping[str, _Other] = VLLM_OPTIONS,
    *,
    whose: str = "LLM has no option",
) -> dict[str, Any]:
    """Return arguments without those of vLLM whose values change nothing.

    `TypeError` for another value says what stands for it.
    """
    left = {}
    for name, value in given.items():
        other = table.get(name)
        if other is None:
            left[name] = value
        elif not any(type(value) is type(known) and value == known for known in other.neutral):
            raise TypeError(f"{whose} '{name}' (got {value!r:.60}): {other.instead}")
    return left
