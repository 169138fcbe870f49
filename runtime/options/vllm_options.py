"""Options and methods of vLLM's that ours do not have: values that change nothing, what stands for
the others. An option is an argument of `LLM` and a flag of the commands that run a model
(runtime/cli/vllm_flags.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEVICES = (
    "a model runs over all devices of this machine, or of cluster='cluster.yaml', as a plan says "
    "(plan='plan.json')"
)
_OWN_DEVICES = (
    "a model runs over all devices of this machine; choose others with CUDA_VISIBLE_DEVICES, or "
    "plan for them: llmpq-algo --devices"
)
_FILES = "files are read from the model's directory"
_LEAVE_FILES = "files are read from the model's directory: leave it out"
_BITS = (
    "a checkpoint's own form is found in its files: leave it out; fewer bits are a plan's "
    "(make_plan, bits=)"
)
_ADAPTERS = "adapters are not run: merge them into the model first"
_DRAFTS = "drafts are speculate='ngram' or another mode, with gamma="
_DRAFT_FLAGS = "drafts are --speculate MODE with --gamma N"
_TEXT = "models read text only"
_MAKES_TEXT = "a model generates text"
_AS_CONFIG = "a model is run as its config.json says"
_KV_STAYS = "KV caches stay on the devices that made them"
_BOTH = (True, False)


@dataclass(frozen=True)
class Other:
    """What stands for an option, as a sentence, and the values that change nothing here."""

    instead: str
    neutral: tuple[Any, ...] | None = (None,)
    """None: all."""
    flag: str = ""
    """What stands for its flag, where that is another sentence."""
    why: str = ""
    """Why its neutral values change nothing, where that is another sentence."""
    short: str = ""
    """The flag's short spelling."""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing."""
        return self.neutral is None or any(
            type(value) is type(known) and value == known for known in self.neutral
        )


_NO_CODE = "no code of a model is ever run"
_BY_PLAN = "the plan says which devices run the model"
_SEVERAL = "several engines are llmpq-dist serve --replicas N"
VLLM_OPTIONS: Mapping[str, Other] = {
    "pipeline_parallel_size": Other(_DEVICES, (1,), _OWN_DEVICES, _BY_PLAN, "-pp"),
    "data_parallel_size": Other(_SEVERAL, (1,), "", "one engine is the default", "-dp"),
    "distributed_executor_backend": Other(
        "how stages run is backend=", flag="how stages run is --backend"
    ),
    "device": Other(_DEVICES, (None, "auto"), _OWN_DEVICES, "all devices are found"),
    "trust_remote_code": Other(_NO_CODE, _BOTH),
    "seed": Other(
        "a seed is each request's: SamplingParams(seed=...)",
        (None, 0),
        "a seed is each request's own",
        "a seed is each request's own",
    ),
    "tokenizer": Other(_FILES, flag=_LEAVE_FILES),
    "tokenizer_mode": Other(_FILES, (None, "auto", "hf"), _LEAVE_FILES, _FILES),
    "tokenizer_revision": Other(_FILES, flag=_LEAVE_FILES),
    "skip_tokenizer_init": Other("a model without tokenizer files runs on token ids", (False,)),
    "hf_config_path": Other(_FILES, flag=_LEAVE_FILES),
    "hf_overrides": Other(_AS_CONFIG, (None, {})),
    "hf_token": Other("the hub's token is HF_TOKEN in the environment"),
    "download_dir": Other("models of the hub lie in its cache: set HF_HOME"),
    "config_format": Other(_FILES, (None, "auto"), _LEAVE_FILES, _FILES),
    "enable_lora": Other(_ADAPTERS, (None, False)),
    "lora_modules": Other(_ADAPTERS),
    "max_loras": Other(_ADAPTERS),
    "max_lora_rank": Other(_ADAPTERS),
    "swap_space": Other("preempted requests are computed again or copied by themselves", None),
    "cpu_offload_gb": Other(
        "layers run on the CPU instead: cluster= or plan=",
        (None, 0),
        "layers run on the CPU instead: llmpq-algo --devices 4090,cpu",
        "no weights are moved while a model runs",
    ),
    "kv_cache_memory_bytes": Other(
        "memory that is used is gpu_memory_utilization=",
        flag="memory that is left free is the plan's: llmpq-algo --reserve",
    ),
    "block_size": Other(
        "a block of the KV cache has 128 tokens",
        (None, 128),
        "a block of the KV cache has 128 tokens: leave it out",
        "a block of the KV cache has 128 tokens",
    ),
    "enable_chunked_prefill": Other(
        "long prompts are always prefilled in chunks", (None, True), "", "it is on"
    ),
    "disable_sliding_window": Other("windows are the model's", (None, False)),
    "max_seq_len_to_capture": Other("graphs are captured for every length", None),
    "disable_log_stats": Other(
        "counters are LLM.get_metrics()", (None, *_BOTH), "", "counters are at /metrics, not logged"
    ),
    "disable_custom_all_reduce": Other(_BY_PLAN, (None, *_BOTH)),
    "use_v2_block_manager": Other("there is one block manager", (None, *_BOTH)),
    "compilation_config": Other(
        "no graphs are enforce_eager=True", flag="no graphs are --enforce-eager"
    ),
    "speculative_config": Other(_DRAFTS, flag=_DRAFT_FLAGS),
    "speculative_model": Other(_DRAFTS, flag=_DRAFT_FLAGS),
    "num_speculative_tokens": Other(_DRAFTS, flag=_DRAFT_FLAGS),
    "guided_decoding_backend": Other("guides are llguidance's", (None, "auto", "guidance")),
    "structured_outputs_config": Other("guides are llguidance's"),
    "limit_mm_per_prompt": Other(_TEXT, (None, {})),
    "mm_processor_kwargs": Other(_TEXT),
    "task": Other(_MAKES_TEXT, (None, "auto", "generate")),
    "runner": Other(_MAKES_TEXT, (None, "auto", "generate")),
    "convert": Other(_MAKES_TEXT, (None, "auto", "none")),
    "served_model_name": Other(
        "names of a server are llmpq-dist serve --served-model-name", flag="llmpq-dist serve has it"
    ),
    "max_logprobs": Other(
        "up to 100 logprobs may be asked for",
        flag="a request may ask for as many as the API allows: leave it out",
    ),
    "model_impl": Other("there is one implementation of a family", (None, "auto")),
    "logprobs_mode": Other("logprobs are the model's own", (None, "raw_logprobs")),
    "scheduling_policy": Other(
        "requests go in order, by their 'priority' first", (None, "fcfs", "priority")
    ),
    "attention_backend": Other(
        "kernels are those of llmpq-dist doctor's table",
        flag="kernels are those of llmpq-dist doctor's table: leave it out",
    ),
    "enable_expert_parallel": Other(
        "devices share layers by tensor_parallel_size=",
        (None, False),
        "devices share layers by --tensor-parallel-size: leave it out",
    ),
    "kv_transfer_config": Other(_KV_STAYS, flag=f"{_KV_STAYS}: leave it out"),
    "kv_events_config": Other(_KV_STAYS, flag=f"{_KV_STAYS}: leave it out"),
    "num_gpu_blocks_override": Other(
        "memory that is used is gpu_memory_utilization=",
        flag="memory that is left free is the plan's: llmpq-algo --reserve",
    ),
    "rope_scaling": Other(_AS_CONFIG),
    "rope_theta": Other(_AS_CONFIG),
    "code_revision": Other(_NO_CODE),
    "enable_sleep_mode": Other(
        "weights stay where they are", (None, False), "weights stay where they are: leave it out"
    ),
    "disable_cascade_attn": Other("there is none", (None, *_BOTH)),
    "override_generation_config": Other(
        "answers are sampled by SamplingParams",
        (None, {}),
        "a server's defaults are llmpq-dist serve --generation-config",
    ),
}
"""Argument of `LLM`; its flag has dashes."""


OTHER_OPTIONS: Mapping[str, Other] = {
    "torch_dtype": Other("it is dtype", (None, "auto")),
    "device_map": Other(_DEVICES, (None, "auto")),
    "load_in_4bit": Other(_BITS, (None, False)),
    "load_in_8bit": Other(_BITS, (None, False)),
    "quantization_config": Other(_BITS),
    "attn_implementation": Other("attention is computed by kernels of our own", None),
    "low_cpu_mem_usage": Other("weights are mapped", None),
    "use_safetensors": Other("weights are safetensors", (None, True)),
    "cache_dir": Other("models of the hub lie in its cache: set HF_HOME"),
    "local_files_only": Other("without the hub's network is HF_HUB_OFFLINE=1", (None, False)),
    "token": Other("the hub's token is HF_TOKEN in the environment"),
    "model_path": Other("it is model"),
    "n_ctx": Other("it is max_model_len", (None, 0)),
    "max_seq_len": Other("it is max_model_len"),
    "n_batch": Other("it is max_num_batched_tokens"),
    "n_gpu_layers": Other(_DEVICES, (None, -1)),
    "tensor_split": Other(_DEVICES),
    "n_threads": Other("threads of a CPU are its cluster's or its plan's"),
    "flash_attn": Other("attention is computed by kernels of our own", None),
    "verbose": Other("the logger is 'llmpq', bars are use_tqdm", (None, *_BOTH)),
    "chat_format": Other("a chat template is the model's, or an argument of LLM.chat"),
    "chat_template": Other("it is an argument of LLM.chat"),
    "draft_model": Other(_DRAFTS),
    "disable_async_output_proc": Other("steps are scheduled ahead", (None, *_BOTH)),
    "num_scheduler_steps": Other("steps are scheduled ahead", (None, 1)),
    "override_pooler_config": Other(_MAKES_TEXT),
    "attention_config": Other("kernels are those of llmpq-dist doctor's table"),
    "allowed_local_media_path": Other(_TEXT, (None, "")),
    "async_scheduling": Other("steps are scheduled ahead", (None, *_BOTH)),
    "logits_processors": Other("use SamplingParams(logit_bias=...) or its likes", (None, [])),
    "batch": Other("it is max_num_seqs"),
    "context": Other("it is max_model_len"),
    "kv": Other("it is kv_cache_dtype"),
    "tensor_parallel": Other("it is tensor_parallel_size"),
    **{
        name: Other(f"it is make_plan's: LLM(model, plan=make_plan(model, {name}=...))")
        for name in (
            "devices",
            "bits",
            "prompt_len",
            "gen_len",
            "omega_file",
            "theta",
            "quality_budget",
            "reserve",
            "method",
            "time_limit_s",
        )
    },
}
"""Arguments of Transformers' `from_pretrained`, of llama.cpp's `Llama`, of `make_plan`, and of
vLLM's that are no flags."""


_BEAMS = "there is no beam search: ask for n answers and choose by cumulative_logprob"
_PLAIN = "a template gets texts as texts"
_GUIDED = "it is structured_outputs=StructuredOutputsParams({})"
_NO_SPACE = "JSON is written without further white space"
VLLM_SAMPLING: Mapping[str, Other] = {
    "detokenize": Other("answers have their text and token_ids", (True, None)),
    "spaces_between_special_tokens": Other("tokens are joined as the tokenizer joins them", _BOTH),
    "output_kind": Other("LLM.stream has what is new, LLM.generate whole answers"),
    "extra_args": Other("there are no plugins that would read them", (None, {})),
    "logits_processors": Other(
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs", (None, [])
    ),
    "guided_decoding": Other("it is structured_outputs=StructuredOutputsParams(...)"),
    "best_of": Other("ask for n answers and choose by cumulative_logprob", (None, 1)),
    "use_beam_search": Other(_BEAMS, (False, None)),
    "length_penalty": Other(_BEAMS, (1.0, 1, None)),
    "early_stopping": Other(_BEAMS, (False, None)),
    "flat_logprobs": Other("logprobs are a dict a token", (False, None)),
    "skip_clone": Other("parameters are values that nothing changes", (None, *_BOTH)),
    "skip_reading_prefix_cache": Other(
        "a cache_salt of its own keeps a request from found prefixes", (None, False)
    ),
    "repetition_detection": Other("use repetition_penalty or frequency_penalty"),
    # Of vLLM before 0.12, of OpenAI's requests, of Transformers and of llama.cpp:
    "guided_json": Other(_GUIDED.format("json=SCHEMA")),
    "guided_regex": Other(_GUIDED.format("regex=REGEX")),
    "guided_choice": Other(_GUIDED.format("choice=[...]")),
    "guided_grammar": Other(_GUIDED.format("grammar=GRAMMAR")),
    "guided_json_object": Other(_GUIDED.format("json_object=True"), (None, False)),
    "response_format": Other(_GUIDED.format("json=SCHEMA")),
    "grammar": Other(_GUIDED.format("grammar=GRAMMAR")),
    "tools": Other("tools are an argument of LLM.chat", (None, [])),
    "tool_choice": Other(_GUIDED.format("calls=TOOLS"), (None, "none")),
    "max_completion_tokens": Other("it is max_tokens"),
    "max_new_tokens": Other("it is max_tokens"),
    "max_length": Other("it is max_tokens, of the answer alone"),
    "n_predict": Other("it is max_tokens"),
    "do_sample": Other("temperature=0 is greedy, a higher one draws"),
    "num_beams": Other(_BEAMS, (1, None)),
    "num_return_sequences": Other("it is n", (1, None)),
    "no_repeat_ngram_size": Other("use repetition_penalty or frequency_penalty", (0, None)),
    "repeat_penalty": Other("it is repetition_penalty", (1.0, 1, None)),
    "eos_token_id": Other("it is stop_token_ids"),
    "stop_strings": Other("it is stop"),
    "stop_sequences": Other("it is stop", (None, [])),
    "suppress_tokens": Other("it is logit_bias, -100 for each token", (None, [])),
}
VLLM_GUIDES: Mapping[str, Other] = {
    "disable_any_whitespace": Other(_NO_SPACE, (None, *_BOTH)),
    "whitespace_pattern": Other(_NO_SPACE),
    "disable_fallback": Other("guides are llguidance's", (None, *_BOTH)),
    "backend": Other("guides are llguidance's", (None, "auto", "guidance")),
    "disable_additional_properties": Other(
        'write "additionalProperties": false into the schema (pydantic: extra="forbid")',
        (None, False),
    ),
    "structural_tag": Other("one of several tools is calls=TOOLS, other forms a grammar"),
    "json_schema": Other("it is json"),
}
"""Of `StructuredOutputsParams`."""
VLLM_CALLS: Mapping[str, Other] = {
    "request_id": Other("it is an argument of LLM.submit and LLM.stream, which do not block"),
    "lora_request": Other(_ADAPTERS),
    "stream": Other("pieces as they come are LLM.stream and LLM.submit", (None, False)),
    "params": Other("it is sampling_params"),
    "conversation": Other("it is the messages of LLM.chat"),
    "prompt_token_ids": Other("token ids are prompts: {'prompt_token_ids': [...]}, or the list"),
    "tokenization_kwargs": Other(
        "texts are tokenised as the model's files say; truncate_prompt_tokens is in SamplingParams",
        (None, {}),
    ),
    "guided_options_request": Other("it is SamplingParams(structured_outputs=...)"),
    "chat_template_content_format": Other(_PLAIN, (None, "auto", "string")),
    "mm_processor_kwargs": Other("models read text only", (None, {})),
    "mm_encoder_kwargs": Other("models read text only", (None, {})),
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
    "model_config": "max_model_len, model_spec and options are LLM's own",
    "llm_engine": "stream, submit, abort and stats are LLM's own methods",
    "enqueue": "it is submit, or as_completed",
    "wait_for_completion": "it is as_completed",
    "from_engine_args": "its arguments are LLM's: LLM(model, max_model_len=...)",
    "apply_chat_template": "it is LLM.get_tokenizer().apply_chat_template, or LLM.chat",
    "tokenize": "it is LLM.get_tokenizer().encode",
    "shutdown": "it is close",
    "set_tokenizer": "files are read from the model's directory",
    "preprocess_chat": "LLM.get_tokenizer().apply_chat_template makes the prompt",
    "start_profile": "LLM(trace='trace.json') writes what stages did, as a Chrome trace",
    "stop_profile": "LLM(trace='trace.json') writes what stages did, as a Chrome trace",
    "reset_mm_cache": "models read text only",
    "sleep": _ASLEEP,
    "wake_up": _ASLEEP,
}
"""Attribute of vLLM's `LLM` -> what stands for it."""


def without_neutral(
    given: Mapping[str, Any],
    table: Mapping[str, Other] = VLLM_OPTIONS,
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
        elif not other.is_neutral(value):
            raise TypeError(f"{whose} '{name}' (got {value!r:.60}): {other.instead}")
    return left
