"""Fields of requests that this server does not obey: those that ask for nothing, and the refused.

What a request asks for is done or refused. Names are those of OpenAI, Anthropic, vLLM, SGLang,
llama.cpp, Ollama and Transformers; other names are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmpq.runtime.options.vllm_options import VLLM_OPTIONS

HINTS = frozenset(
    (
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "verbosity",
        "cache_control",
        "cache_prompt",
        "inference_geo",
        "session_id",
        "stream_id",
        "max_tool_calls",
        "spaces_between_special_tokens",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "access_programs",
        "guided_decoding_backend",
        "background_options",
        # llama.cpp's and Ollama's
        "keep_alive",
        "id_slot",
        "repeat_last_n",
        "mirostat_tau",
        "mirostat_eta",
        "dynatemp_exponent",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "xtc_threshold",
    )
)
"""Labels, hints, and what says more of a field that is refused: no answer could show that they were
ignored."""

_NO_SAMPLER = "this server samples by temperature, top_k, top_p, min_p and penalties; leave it out"
_ONE = "one answer is made; ask /v1/chat/completions or /v1/completions for several"
_TOOLS = "send 'tools' and 'tool_choice'"
_GUIDE = "say what the text must be with 'response_format' or 'structured_outputs'"
_THOUGHTS = "only chats tell thoughts from text"
_FIXED = "it is set when the server starts (--chat-template)"
_KWARGS = 'write {"chat_template_kwargs": {"enable_thinking": true or false}}'
_MEDIA = "the model reads and writes text only; leave it out"
_ADAPTERS = VLLM_OPTIONS["enable_lora"].instead
_GOES_ON = "set 'continue_final_message': true"
_OUTSIDE = "this server runs no tools of its own; leave it out"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # OpenAI
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "modalities": ((["text"],), _MEDIA),
    "audio": ((), _MEDIA),
    "image": ((), _MEDIA),
    "web_search_options": ((), _OUTSIDE),
    "moderation": ((), _OUTSIDE),
    "store": ((False,), "only /v1/responses are stored; leave it out"),
    "background": ((False,), "ask with 'stream' or wait for the answer"),
    "truncation": (
        ("disabled",),
        "what is too long is refused; shorten the input or set truncate_prompt_tokens",
    ),
    "context_management": (([],), "shorten the input yourself"),
    "conversation": ((), "send the whole input, or 'previous_response_id'"),
    "include_reasoning": ((True,), _THOUGHTS),
    # Anthropic
    "thinking": ((), f"it is a field of /v1/messages; {_KWARGS}"),
    "container": ((), _OUTSIDE),
    "mcp_servers": (([],), _OUTSIDE),
    # vLLM
    "use_beam_search": ((False,), _NO_SAMPLER),
    "length_penalty": ((1, 1.0), _NO_SAMPLER),
    "early_stopping": ((False,), _NO_SAMPLER),
    "watermarking": ((False,), _NO_SAMPLER),
    "repetition_detection": ((), _NO_SAMPLER),
    "logits_processors": (([],), _NO_SAMPLER),
    "truncation_side": (("left",), "the end of a prompt is what stays"),
    "prompt_embeds": ((), "send 'prompt', a text or token ids"),
    "add_special_tokens": ((False,), "a chat template writes them itself"),
    "documents": (([],), "write them into a message"),
    "chat_template": ((), _FIXED),
    "logprob_token_ids": ((), "set top_logprobs"),
    "return_tokens_as_token_ids": ((False,), "read 'return_token_ids'"),
    "return_prompt_text": ((False,), "read 'return_token_ids'"),
    "timeout_s": ((), "the server sets it (--request-timeout)"),
    "request_id": ((), "send it as the header X-Request-Id"),
    "guided_whitespace_pattern": ((), "JSON is written without free white space"),
    "structural_tag": ((), _GUIDE),
    "kv_transfer_params": ((), "this server keeps its own cache"),
    "ec_transfer_params": ((), "this server keeps its own cache"),
    "vllm_xargs": (({},), _NO_SAMPLER),
    # SGLang
    "regex": ((), _GUIDE),
    "ebnf": ((), _GUIDE),
    "stop_regex": (([],), "set 'stop'"),
    "no_stop_trim": ((False,), "set 'include_stop_str_in_output'"),
    "lora_path": ((), _ADAPTERS),
    "custom_logit_processor": ((), _NO_SAMPLER),
    "separate_reasoning": ((True,), _THOUGHTS),
    # llama.cpp, Ollama and others
    "lora": (([],), _ADAPTERS),
    "adapter_id": ((), _ADAPTERS),
    "grammar": (("",), "set 'guided_grammar'"),
    "json_schema": (({},), _GUIDE),
    "n_predict": ((), "set 'max_tokens'"),
    "num_predict": ((), "set 'max_tokens'"),
    "num_ctx": ((), "it is set when the server starts (--max-model-len)"),
    "n_keep": ((0,), "what is too long is refused, nothing of it is dropped"),
    "t_max_predict_ms": ((0, -1), "the server sets it (--request-timeout)"),
    "timings_per_token": (
        (False,),
        "the access log and /metrics have times",
    ),
    "return_progress": ((False,), "a stream begins with the first token"),
    "reasoning_format": (("auto", "deepseek"), "set 'separate_reasoning': true or false"),
    "repeat_penalty": ((1, 1.0), "set 'repetition_penalty'"),
    "n_probs": ((0,), "set 'logprobs'"),
    "mirostat": ((0,), _NO_SAMPLER),
    "typical_p": ((1, 1.0), _NO_SAMPLER),
    "tfs_z": ((1, 1.0), _NO_SAMPLER),
    "top_a": ((0, 0.0), _NO_SAMPLER),
    "top_n_sigma": ((-1, -1.0), _NO_SAMPLER),
    "xtc_probability": ((0, 0.0), _NO_SAMPLER),
    "dry_multiplier": ((0, 0.0), _NO_SAMPLER),
    "dynatemp_range": ((0, 0.0), _NO_SAMPLER),
    "penalty_alpha": ((0, 0.0), _NO_SAMPLER),
    "samplers": ((), _NO_SAMPLER),
    "options": (({},), "write its fields into the request itself"),
    "format": ((), _GUIDE),
    "think": ((), _KWARGS),
    "enable_thinking": ((), _KWARGS),
    # Transformers' arguments, and openai-python's as other clients send it
    "max_new_tokens": ((), "set 'max_tokens'"),
    "max_length": ((), "set 'max_tokens', of the answer alone"),
    "do_sample": ((True,), "'temperature': 0 is greedy"),
    "num_beams": ((1,), _NO_SAMPLER),
    "extra_body": (({},), "write its fields into the request itself"),
    # What another door of this server answers.
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "suffix": (("",), "the model continues text"),
    "max_tokens": ((), "set 'max_output_tokens'"),
    "max_completion_tokens": ((), "set the token limit by this path's own name"),
    "logprobs": ((False,), "this path's answers have no room for them"),
    "top_logprobs": ((0,), "this path's answers have no room for them"),
    "prompt_logprobs": ((), "this path's answers have no room for them"),
    "return_token_ids": ((False,), "this path's answers have no room for them"),
    "echo": ((False,), "this path's answers begin behind the prompt"),
    "parallel_tool_calls": ((True,), "this path has a field of its own, or no tools"),
    "stream_options": ((), "this path's streams always tell what they took"),
    "stop_sequences": (([],), "set 'stop'"),
    "system": ((), "send a system message or 'instructions'"),
    "instructions": ((), "send a system message"),
    "input": ((), "send 'messages', or ask /v1/responses"),
    "max_output_tokens": ((), "set 'max_tokens'"),
    "text": (({"format": {"type": "text"}},), "set this path's own format field"),
    "output_config": (({},), "set this path's own format field"),
    "output_format": ((), "set this path's own format field"),
    "include": (([],), "set 'logprobs'"),
    "reasoning": (({},), "set 'reasoning_effort'"),
    "previous_response_id": ((), "ask /v1/responses"),
    "messages": ((), "send them to /v1/chat/completions"),
    "prompt": ((), "send it to /v1/completions"),
    "tools": (([],), "send 'messages' to /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "send 'messages' to /v1/chat/completions"),
    "response_format": (({"type": "text"},), "this path has a format field of its own"),
    "stop": (([], ""), "set this path's own stop field"),
    "reasoning_effort": ((), "this path has a field of its own, or no template"),
    "continue_final_message": ((False,), "end the messages with one of the assistant"),
    "chat_template_kwargs": (({},), "only chats have a template"),
    "add_generation_prompt": ((True,), "only chats have a template"),
}
"""By name: the values that change nothing, and what to do instead."""

REFUSED_IN_MESSAGES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _MEDIA),
    "images": (([],), _MEDIA),
    # DeepSeek's and Mistral's name, and Moonshot's and Qwen's, of the same thing.
    "prefix": ((False,), _GOES_ON),
    "partial": ((False,), _GOES_ON),
}
"""The same of the fields of one message of a chat."""
