"""The flags of `llmpq-dist serve`, and what they become. Imports no torch and no web framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmpq.commands.command_line import CommandParser, Only, Section, token_count
from llmpq.gpu_memory import GPU_SHARE_HELP
from llmpq.plan import Prefer
from llmpq.runtime.cli.run_flags import (
    add_generation_config,
    add_kv_pool,
    add_model,
    add_plan,
    add_prefer,
    kv_pool_wish,
)
from llmpq.runtime.cli.vllm_flags import VLLM_FLAGS
from llmpq.runtime.launch.launcher import BACKENDS, Backend
from llmpq.runtime.launch.plans.planned_kv import AUTO
from llmpq.runtime.serve.parsers import tool_forms
from llmpq.runtime.serve.parsers.harmony import HARMONY
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.runtime.text import thinking

DEFAULTS = ServeSettings(model_names=())


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to serve, where, and for whom."""

    plan: str | None
    source: str | None
    model: str | None
    cluster: str | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    no_prefix_cache: bool
    kv_pool: bool
    no_kv_pool: bool
    max_num_seqs: int | None
    dtype: str
    kv_cache_dtype: str
    gpu_memory_utilization: float | None
    generation_config: str
    prefer: Prefer | None
    backend: Backend
    ray_address: str | None
    speculate: str | None
    gamma: int | None
    ray_serve: bool
    replicas: int
    host: str
    port: int
    uds: str | None
    root_path: str
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: int | None
    served_model_name: list[str] | None
    api_key: list[str] | None
    api_key_file: str | None
    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str | None
    max_body_bytes: int
    max_prompts: int
    max_n: int
    max_requests: int
    max_stored_responses: int
    request_timeout: float | None
    read_timeout: float
    write_timeout: float
    drain_timeout: float
    cors_origin: list[str] | None
    metrics_prefix: Literal["vllm", "llmpq"]
    no_access_log: bool
    log_prompts: bool
    trace: str | None


def engine_options(options: ServeOptions) -> dict[str, Any]:
    """Return what every engine is given, whoever plans for it."""
    return {
        "backend": options.backend,
        "kv_cache_dtype": options.kv_cache_dtype,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "generation_config": options.generation_config,
        "speculate": options.speculate,
        "gamma": options.gamma,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": not options.no_prefix_cache,
        "kv_pool": kv_pool_wish(options.kv_pool, options.no_kv_pool),
    }


def serve_parser() -> CommandParser:
    """Return the flags of `llmpq-dist serve`."""
    parser = CommandParser(
        "llmpq-dist serve",
        "Answer OpenAI's API over HTTP: through a plan, or planned for the devices there are.",
        example="llmpq-dist serve DIR --port 8000",
        notes="The server listens on this machine only unless --host says otherwise.",
        others=VLLM_FLAGS,
    )
    text = "directory, GGUF file or name on Hugging Face's hub (or --model, or --plan)"
    parser.positional("source", nargs="?", metavar="MODEL", help=text)
    what = parser.section("what to serve")
    add_plan(what, text="plan.json of llmpq-algo (default: plan for the devices there are)")
    add_model(what, "source")
    what.flag("--cluster", daily=True, metavar="YAML", help="plan for, or check, its devices")
    name = "what requests may call the model, several times for several names (default: folder)"
    what.flag("--served-model-name", daily=True, action="append", metavar="NAME", help=name)
    unplanned = Only(lambda a: a.plan is None, "with --plan, whose plan says it", "re-plan")
    length = (
        "tokens of a prompt and its answer (default: the model's positions; with --no-kv-pool a "
        "plan says it on GPUs)"
    )
    what.flag("--max-model-len", daily=True, type=token_count, metavar="N", help=length)
    what.flag(
        "--max-num-seqs",
        daily=True,
        type=int,
        metavar="N",
        only=unplanned,
        help="requests that run at once",
    )
    add_kv_pool(what)
    add_generation_config(what, "ends of answers and default sampling")
    add_prefer(what)
    step = "tokens of a step over a pool: a long prompt holds answers up no longer (default: 512, "
    step += "or what the plan's costs have ready in 0.1 s)"
    what.flag("--max-num-batched-tokens", type=token_count, metavar="N", help=step)
    what.flag(
        "--no-prefix-cache", action="store_true", help="do not reuse KV blocks of earlier prompts"
    )
    what.flag(
        "--dtype", default=AUTO, only=unplanned, help="float16, bfloat16, float32 or a precision"
    )
    what.flag("--kv-cache-dtype", default=AUTO, metavar="KV", help="kv16, kv8, kv4 or kv2")
    what.flag("--gpu-memory-utilization", type=float, metavar="SHARE", help=GPU_SHARE_HELP)
    what.flag(
        "--speculate",
        metavar="MODE",
        help="speculative decoding: off, or a draft mode such as ngram",
    )
    what.flag("--gamma", type=int, metavar="N", help="tokens drafted per verify")
    what.flag(
        "--backend", choices=BACKENDS, default="auto",
        help="how stages run; auto: as processes of this host, those of several nodes through Ray",
    )  # fmt: skip
    what.flag("--ray-address", also=("--address",), help="join this Ray")
    what.flag("--chat-template", metavar="FILE", help="Jinja, instead of the model's own")
    what.flag(
        "--tool-call-parser",
        type=lambda name: tool_forms.ALIASES.get(name, name),
        choices=tool_forms.NAMES,
        default="auto",
        metavar="FORM",
        help=f"how the model writes calls of tools: {', '.join(tool_forms.NAMES)} (default: "
        "auto, as its template shows)",
    )
    names = ("auto", *thinking.MARKS, HARMONY)
    what.flag(
        "--reasoning-parser",
        type=lambda name: thinking.ALIASES.get(name, name),
        choices=names,
        default="auto",
        metavar="FORM",
        help=f"the marks between which the model thinks: {', '.join(names)} (default: auto, as its "
        "template or tokenizer shows)",
    )
    what.flag(
        "--no-reasoning-parser",
        dest="reasoning_parser",
        action="store_const",
        const=None,
        help="thoughts stay part of the text",
    )
    _add_server(parser.section("server"))
    _add_limits(parser.section("limits"))
    return parser


def _add_server(server: Section) -> None:
    text = "several engines behind one port, watched and replaced by Ray Serve"
    server.flag("--ray-serve", action="store_true", help=text)
    text = "engines of --ray-serve, each on its share of this machine's devices (1)"
    server.flag("--replicas", type=int, default=1, metavar="N", help=text)
    server.flag("--host", daily=True, default="127.0.0.1", help="address (default 127.0.0.1)")
    server.flag("--port", daily=True, type=int, default=8000, metavar="N", help="port (8000)")
    server.flag("--uds", metavar="FILE", help="listen at this socket instead of host and port")
    text = "path under which a proxy shows the server (/llm); it is answered with and without it"
    server.flag("--root-path", default="", metavar="PATH", help=text)
    server.flag("--ssl-certfile", metavar="FILE", help="speak TLS with this certificate (PEM)")
    text = "its key (default: in the same file)"
    server.flag("--ssl-keyfile", metavar="FILE", help=text)
    text = "clients must show a certificate signed by one of these"
    server.flag("--ssl-ca-certs", metavar="FILE", help=text)
    text = "0: they need not; 1: it must be right if they do; 2: they must (default with a CA)"
    server.flag("--ssl-cert-reqs", type=int, choices=(0, 1, 2), metavar="N", help=text)
    server.flag(
        "--api-key",
        daily=True,
        action="append",
        metavar="KEY",
        help="require this key (may repeat)",
    )
    server.flag(
        "--api-key-file", metavar="FILE", help="keys, one per line, which process lists do not show"
    )
    server.flag(
        "--cors-origin",
        action="append",
        metavar="URL",
        help="allow pages of this origin (may repeat)",
    )
    server.flag(
        "--metrics-prefix",
        choices=("vllm", "llmpq"),
        default=DEFAULTS.metrics_prefix,
        help="prefix of metrics that vLLM also has (default vllm, for its dashboards)",
    )
    server.flag("--no-access-log", action="store_true", help="no JSON line for each request")
    server.flag("--log-prompts", action="store_true", help="log every prompt as a JSON line")
    alone = Only(lambda a: not a.ray_serve, "with --ray-serve", "trace a server of one engine")
    text = "write a Chrome/Perfetto trace at the end: every stage's steps, and for which requests"
    server.flag("--trace", metavar="FILE", only=alone, help=text)
    server.flag(
        "--drain-timeout",
        daily=True,
        type=float,
        default=DEFAULTS.drain_timeout_s,
        metavar="S",
        help="seconds that running requests get to finish after SIGTERM (30)",
    )


def _add_limits(limits: Section) -> None:
    for name, value, text in (
        (
            "--max-requests",
            DEFAULTS.max_requests,
            "requests taken at once, running or waiting; more get 429",
        ),
        ("--max-prompts", DEFAULTS.max_prompts, "prompts in one request"),
        ("--max-n", DEFAULTS.max_n, "answers to one prompt"),
        ("--max-body-bytes", DEFAULTS.max_body_bytes, "bytes of a request's body"),
        (
            "--max-stored-responses",
            DEFAULTS.max_stored_responses,
            "answers of /v1/responses in memory, to go on from; none with --ray-serve",
        ),
    ):
        limits.flag(name, type=int, default=value, metavar="N", help=f"{text} ({value})")
    limits.flag(
        "--request-timeout", type=float, metavar="S", help="seconds an answer may take (any)"
    )
    for name, seconds, text in (
        ("--read-timeout", DEFAULTS.read_timeout_s, "a request's head, and its body, may take"),
        ("--write-timeout", DEFAULTS.write_timeout_s, "a client may stop reading its answer"),
    ):
        help_text = f"seconds {text} ({seconds:g})"
        limits.flag(name, type=float, default=seconds, metavar="S", help=help_text)
