"""The flags of `llmpq-dist serve`, and what they become. Imports no torch and no web framework."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmpq.commands.command_line import CommandParser, Only, Section, in_seconds
from llmpq.runtime.cli.engine_flags import add_engine_flags
from llmpq.runtime.cli.run_flags import add_model, add_plan
from llmpq.runtime.cli.vllm_flags import IDLE_FLAGS, LENGTH_FLAGS, OTHER_FLAGS, SAMPLING_FLAGS
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.serve.parsers import tool_forms
from llmpq.runtime.serve.parsers.harmony import HARMONY
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.runtime.text import thinking

DEFAULTS = ServeSettings()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to serve, where, and for whom."""

    plan: str | None
    source: str | None
    model: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServeSettings = field(default_factory=ServeSettings)
    replicas: int
    host: str
    port: int
    served_model_name: list[str] | None
    api_key: list[str] | None
    api_key_file: str | None
    chat_template: str | None
    no_access_log: bool


NOTES = """\
http://127.0.0.1:8000/ is a page to chat and to watch the stages, the API is under /v1.
The server listens on this machine only unless --host says otherwise."""


def serve_parser() -> CommandParser:
    """Return the flags of `llmpq-dist serve`."""
    parser = CommandParser(
        "llmpq-dist serve",
        "Answer OpenAI's API over HTTP: through a plan, or planned for the devices there are.",
        example="llmpq-dist serve DIR --port 8000",
        notes=NOTES,
        others={**OTHER_FLAGS, **LENGTH_FLAGS, **SAMPLING_FLAGS},
        idle=IDLE_FLAGS,
    )
    text = "directory, GGUF file or name on Hugging Face's hub (or --model, or --plan)"
    parser.positional("source", nargs="?", metavar="MODEL", help=text)
    what = parser.section("what to serve")
    add_plan(what, text="plan.json of llmpq-algo (default: plan for the devices there are)")
    add_model(what, "source")
    name = "what requests may call the model, several times for several names (default: folder)"
    what.flag("--served-model-name", daily=True, action="append", metavar="NAME", help=name)
    add_engine_flags(
        what,
        "quantization",
        "cluster",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "generation_config",
        "prefer",
        "head_bits",
        "tensor_parallel_size",
        "dtype",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "speculate",
        "gamma",
        "costs",
        "enforce_eager",
        "backend",
        "ray_address",
        "layer_cache",
        "keep_layers_in",
        "deadlines",
        "on_loss",
        "min_quality",
        daily=("cluster", "max_model_len", "max_num_seqs"),
        defaults={"on_loss": "replan"},
    )
    what.flag("--chat-template", metavar="FILE", help="Jinja, instead of the model's own")
    what.flag(
        "--tool-call-parser",
        dest="tool_parser",
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
    text = "engines behind one port, each a process on its share of this machine's devices (1)"
    server.flag("--replicas", type=int, default=1, metavar="N", help=text)
    tcp = Only(lambda a: a.uds is None, "with --uds", "leave that out")
    text = "address (default 127.0.0.1)"
    server.flag("--host", daily=True, default="127.0.0.1", only=tcp, help=text)
    server.flag(
        "--port", daily=True, type=int, default=8000, metavar="N", only=tcp, help="port (8000)"
    )
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
        help="require this key (may repeat; default: the variable LLMPQ_API_KEY, else "
        "VLLM_API_KEY, if set)",
    )
    server.flag(
        "--api-key-file",
        metavar="FILE",
        help="keys, one per line (# begins a comment), which process lists do not show",
    )
    server.flag(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
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
    alone = Only(lambda a: a.replicas == 1, "with --replicas", "trace a server of one engine")
    add_engine_flags(server, "trace", only=alone)
    server.flag(
        "--drain-timeout",
        dest="drain_timeout_s",
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
            "answers of /v1/responses in memory, to go on from; none with --replicas",
        ),
    ):
        limits.flag(name, type=int, default=value, metavar="N", help=f"{text} ({value})")
    text = "seconds an answer may take (any)"
    limits.flag(
        "--request-timeout", dest="request_timeout_s", type=in_seconds, metavar="S", help=text
    )
    for name, seconds, text in (
        ("--read-timeout", DEFAULTS.read_timeout_s, "a request's head, and its body, may take"),
        ("--write-timeout", DEFAULTS.write_timeout_s, "a client may stop reading its answer"),
    ):
        dest = name.strip("-").replace("-", "_") + "_s"
        help_text = f"seconds {text} ({seconds:g})"
        limits.flag(name, dest=dest, type=in_seconds, default=seconds, metavar="S", help=help_text)
