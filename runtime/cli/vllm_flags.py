"""Flags of vLLM, llama.cpp, llmpq-algo and earlier versions, and what stands for them here.

What vLLM has as arguments of `LLM`, too, is in runtime/options/vllm_options.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmpq.commands.command_line import Idle
from llmpq.runtime.options.engine_options import AUTO, OWN_FORMATS, QUANTISED_FORMATS
from llmpq.runtime.options.vllm_options import VLLM_OPTIONS, Other

_LENGTH = "lengths are each request's own; a plan's are llmpq-algo --prompt-len and --gen-len"
_DEVICES = VLLM_OPTIONS["pipeline_parallel_size"].flag
_SHARED = "devices that share layers are a plan's: llmpq-algo --tensor-parallel N"
_NO_PLUGINS = "no code of others is loaded: leave it out"
_CORS = "pages of other origins are llmpq-dist serve --cors-origin URL"
_FORM = (
    "a checkpoint's own form is found in its files: leave it out; for fewer bits plan with "
    "llmpq-algo --bits"
)
_LOGS = "lines of the log are llmpq-dist serve --no-access-log and --log-prompts"
_HOSTS = "several machines are --cluster YAML, or a Ray: --ray-address HOST:PORT"
_TRACES = "what stages did is --trace FILE"
_GRAPHS = "graphs are captured for every length: leave it out"
_LAYERS = "which device has which layers is planned: llmpq-algo --devices"
_KV_BITS = "the bits of the KV cache are --kv-cache-dtype"
_IN_RAM = "the CPU computes whole layers instead: llmpq-algo --devices 4090,cpu"
_HUB = "a model of the hub is --model NAME"
_NOTHING = (
    *("--mamba-cache-dtype", "--mamba-block-size", "--calculate-kv-scales", "--enable-eplb"),
    *("--disable-hybrid-kv-cache-manager", "--prefix-caching-hash-algo", "--performance-mode"),
    *(
        "--reasoning-config",
        "--safetensors-load-strategy",
        "--swa-full",
        "--no-warmup",
        "--numa-bind",
    ),
)
_CHUNKS = "a prompt's chunks are the plan's, of llmpq-dist serve --max-num-batched-tokens N"
_KV_STAYS = "KV caches stay on the devices that made them: leave it out"
_ENGINES = VLLM_OPTIONS["data_parallel_size"].instead
_PARALLEL = ("size-local", "address", "rpc-port", "backend", "hybrid-lb", "external-lb", "rank")
_KERNELS = VLLM_OPTIONS["attention_backend"].flag
_DRAFTS = VLLM_OPTIONS["speculative_config"].flag
_MAKES_TEXT = VLLM_OPTIONS["runner"].instead
_AS_CONFIG = VLLM_OPTIONS["rope_scaling"].instead
_THREADS = "threads of a CPU are a cluster file's (threads:), or OMP_NUM_THREADS"
_PROMPT = "prompts are rows of llmpq-dist run -i FILE; one at a time: llmpq-dist chat"


def _flags(name: str, other: Other) -> list[str]:
    return [f"--{name.replace('_', '-')}", *filter(None, [other.short])]


def _answers() -> Iterator[tuple[str, str]]:
    """Yield what stands for an option's flags, where a value does not change nothing."""
    for name, other in VLLM_OPTIONS.items():
        if other.neutral is not None and True not in _switches(other):
            yield from ((flag, other.flag or other.instead) for flag in _flags(name, other))


def _switches(other: Other) -> list[bool]:
    """Return the neutral values of an option that is on or off."""
    return [value for value in other.neutral or () if isinstance(value, bool)]


def _idle() -> Iterator[tuple[str, Idle]]:
    """Yield an option's flags, and the values with which they change nothing."""
    for name, other in VLLM_OPTIONS.items():
        why = other.why or other.flag or other.instead
        flags, switches = _flags(name, other), _switches(other)
        if switches:
            yield from ((flag, Idle(why)) for flag in flags if True in switches)
            if False in switches:
                yield flags[0].replace("--", "--no-", 1), Idle(why)
            continue
        values = None if other.neutral is None else tuple(map(str, other.neutral))
        if values != ("None",):  # which is not typed
            yield from ((flag, Idle(why, values)) for flag in flags)


VLLM_FLAGS: Mapping[str, str] = {
    **dict(_answers()),
    "--tensor-parallel-size": _SHARED,
    "-tp": _SHARED,
    "--ray-serve": "replicas are processes of this machine: leave it out, --replicas N is enough",
    "--max-model-len": _LENGTH,
    "--max-seq-len": _LENGTH,
    "--max-num-seqs": "requests at once are the plan's: llmpq-algo --batch",
    "--max-num-batched-tokens": "a step's tokens are the plan's",
    "--dtype": "the dtype is the plan's: llmpq-algo --dtype",
    "--load-format": _FORM,
    "--gpu-memory-utilization": "the memory used is the plan's: llmpq-algo has the flag",
    "--no-enable-prefix-caching": "llmpq-dist serve has it",
    "--max-tokens": "answers' lengths are the requests' own",
    "--api-server-count": "one process answers HTTP: leave it out; several engines: --replicas N",
    "--uvicorn-log-level": "llmpq-dist serve has --no-access-log",
    "--chat-template-content-format": "contents go to a template as texts: leave it out",
    "--default-chat-template-kwargs": "requests say them: chat_template_kwargs of a body",
    "-p": _PROMPT,
    "--prompt": _PROMPT,
    "-m": "the model is --model DIR, or a plan --plan FILE",
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "-ngl": _DEVICES,
    "--tensor-split": _LAYERS,
    "-ts": _LAYERS,
    "--split-mode": _LAYERS,
    "--main-gpu": _LAYERS,
    "--cache-type-k": _KV_BITS,
    "--cache-type-v": _KV_BITS,
    "-ctk": _KV_BITS,
    "-ctv": _KV_BITS,
    "--n-cpu-moe": _IN_RAM,
    "--cpu-moe": _IN_RAM,
    "--override-tensor": _IN_RAM,
    "--hf-repo": _HUB,
    "-hf": _HUB,
    "--rpc": _HOSTS,
    "--keep-alive": "a model stays loaded until the command ends: leave it out",
    "--disable-uvicorn-access-log": "llmpq-dist serve has --no-access-log",
    "--config": "flags are typed, not read from a file",
    "--log-level": _LOGS,
    "--log-config-file": _LOGS,
    "--max-log-len": _LOGS,
    "--enable-log-requests": _LOGS,
    "--enable-log-outputs": "answers are never logged: leave it out",
    "--allowed-origins": _CORS,
    "--allowed-methods": _CORS,
    "--allowed-headers": _CORS,
    "--allow-credentials": _CORS,
    "--ssl-ciphers": "ciphers are those of Python's defaults: leave it out",
    "--enable-ssl-refresh": "certificates are read at start: leave it out",
    "--middleware": _NO_PLUGINS,
    "--logits-processors": _NO_PLUGINS,
    "--tool-parser-plugin": "forms of calls are --tool-call-parser FORM",
    "--reasoning-parser-plugin": "marks of thoughts are --reasoning-parser FORM",
    "--tool-server": "tools are run by the client: leave it out",
    "--trust-request-chat-template": "the template is the model's, or --chat-template FILE",
    "--enable-tokenizer-info-endpoint": "texts are tokenised at /tokenize: leave it out",
    "--enable-force-include-usage": "streams count where they ask: stream_options of a body",
    "--headless": _HOSTS,
    "--nnodes": _HOSTS,
    "--node-rank": _HOSTS,
    "--master-addr": _HOSTS,
    "--cuda-graph-sizes": _GRAPHS,
    "--optimization-level": _GRAPHS,
    "-O": _GRAPHS,
    "--otlp-traces-endpoint": _TRACES,
    "--collect-detailed-traces": _TRACES,
    "--no-async-scheduling": "several steps are always under way: leave it out",
    "--no-enable-chunked-prefill": VLLM_OPTIONS["enable_chunked_prefill"].instead,
    "--context-length": "the longest request is --max-model-len N",
    "--mem-fraction-static": "it is --gpu-memory-utilization SHARE",
    "--alias": "it is --served-model-name NAME",
    "--parallel": "requests at once are --max-num-seqs N",
    "-np": "requests at once are --max-num-seqs N",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--n-gpu-layers": _DEVICES,
    "--timeout": "seconds of an answer are --request-timeout, of a silent client --read-timeout",
    "--max-concurrency": "requests taken at once are --max-requests N",
    "--max-concurrent-requests": "requests taken at once are --max-requests N",
    "--workers": VLLM_OPTIONS["data_parallel_size"].instead,
    "--shutdown-timeout": "seconds of running requests after SIGTERM are --drain-timeout S",
    "--distributed-timeout-seconds": "seconds of phases are --deadlines NAME=S",
    "--disable-access-log-for-endpoints": "probes are logged only where they fail: leave it out",
    "--stream-interval": "tokens are sent as they come: leave it out",
    "--return-tokens-as-token-ids": "requests ask for them: return_token_ids of a body",
    "--profiler-config": _TRACES,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--allowed-local-media-path": VLLM_OPTIONS["limit_mm_per_prompt"].instead,
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _CHUNKS),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills"), _CHUNKS),
    "--long-prefill-token-threshold": _CHUNKS,
    **dict.fromkeys(("--kv-cache-memory", "--kv-offloading-size", "--no-kv-offload"), _KV_STAYS),
    **dict.fromkeys((f"--data-parallel-{name}" for name in _PARALLEL), _ENGINES),
    **dict.fromkeys(("--moe-backend", "--all2all-backend", "-fa", "--flash-attn"), _KERNELS),
    **dict.fromkeys(("-sm", "-mg", "-dev"), _LAYERS),
    **dict.fromkeys(("-v", "--verbose", "--log-file", "--log-disable"), _LOGS),
    "-a": "it is --served-model-name NAME",
    **dict.fromkeys(("--lora", "--lora-scaled"), VLLM_OPTIONS["enable_lora"].instead),
    **dict.fromkeys(("-md", "--model-draft", "--draft", "--draft-max"), _DRAFTS),
    **dict.fromkeys(("-hff", "--hf-file"), "a file of the hub is --model NAME/FILE.gguf"),
    "--num-ctx": _LENGTH,
    **dict.fromkeys(("-tb", "--threads-batch", "--threads-http"), _THREADS),
    **dict.fromkeys(("--embedding", "--embeddings", "--reranking", "--pooling"), _MAKES_TEXT),
    **dict.fromkeys(("--rope-freq-scale", "--rope-freq-base", "--yarn-orig-ctx"), _AS_CONFIG),
    "--chat-template-file": "it is --chat-template FILE",
    "--chat-template-kwargs": "requests say them: chat_template_kwargs of a body",
    "--reasoning-format": "marks of thoughts are --reasoning-parser FORM",
    "--reasoning-budget": "requests say it: thinking_token_budget of a body",
    "--api-prefix": "the path of a proxy is --root-path PATH",
    "--no-webui": "the page at / is always there: leave it out",
    "--slots": "what runs is on the page at / and in /metrics: leave it out",
    "--props": "what is served is at /v1/models: leave it out",
    "--offline": "without the hub's network is HF_HUB_OFFLINE=1",
    "--cache-reuse": "blocks of prompts that begin alike are found again: leave it out",
    "--models-dir": "a server has one model: --model DIR",
    "--sleep-idle-seconds": "a model stays loaded until the command ends: leave it out",
    "--list-devices": "devices are listed by llmpq-algo devices",
    "--fit": "what fits is said by llmpq-algo fits, and planned by itself: leave it out",
    **dict.fromkeys(("--no-mmap", "--mlock"), "weights are mapped: leave it out"),
    "--keep": "nothing of a prompt is dropped: leave it out",
    **dict.fromkeys(_NOTHING, "there is nothing of the kind here: leave it out"),
    "--numa": "CPUs of several sockets are devices of a cluster file: leave it out",
}
"""Flag of vLLM or llama.cpp -> what stands for it here, as the end of a sentence."""

SAMPLING_FLAGS: Mapping[str, str] = dict.fromkeys(
    ("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "-n",
     "--n-predict", "--presence-penalty", "--frequency-penalty", "-s", "--max-tokens"),
    "requests say how they are sampled, and how long; what they leave out is the model's "
    "generation_config.json's (--generation-config DIR)",
)  # fmt: skip
"""For a server."""

BENCH_FLAGS: Mapping[str, str] = {
    "--num-prompts": "requests of a bench are --batch",
    "--batch-size": "requests of a bench are --batch",
    "--input-len": "tokens of a bench's prompts are --prompt",
    "--output-len": "new tokens of a bench are --gen",
    "-b": "requests of a bench are --batch",
    "-n": "new tokens of a bench are --gen",
}
"""For `bench`."""

IDLE_FLAGS: Mapping[str, Idle] = {
    **dict(_idle()),
    "--tensor-parallel-size": Idle("a stage has one device unless a plan says so", ("1",)),
    "-tp": Idle("a stage has one device unless a plan says so", ("1",)),
    "--enable-prefix-caching": Idle("it is on"),
    "--enable-auto-tool-choice": Idle("tools are on wherever the model's template has them"),
    "--enable-reasoning": Idle("thoughts leave apart from the text by themselves"),
    "--disable-log-requests": Idle("prompts are not logged unless --log-prompts asks"),
    "--no-enable-log-requests": Idle("prompts are not logged unless --log-prompts asks"),
    "--async-scheduling": Idle("several steps are always under way"),
    "--enable-prompt-tokens-details": Idle("usage has them"),
    "--enable-server-load-tracking": Idle("/load is there"),
    "--enable-request-id-headers": Idle("answers have X-Request-Id"),
    "--language-model-only": Idle("models read text only"),
    "--skip-mm-profiling": Idle("models read text only"),
    "--use-tqdm-on-load": Idle("loading says how far it is"),
    "--api-server-count": Idle("one process answers HTTP", ("1",)),
    "--stream-interval": Idle("tokens are sent as they come", ("1",)),
    "--response-role": Idle("answers are the assistant's", ("assistant",)),
    "--jinja": Idle("chat templates are Jinja"),
    "--metrics": Idle("/metrics is there"),
    "--webui": Idle("the page at / is there"),
    "--mmap": Idle("weights are mapped"),
    "-cb": Idle("requests join and leave between steps"),
    "--cont-batching": Idle("requests join and leave between steps"),
    "--no-context-shift": Idle("nothing of a prompt is dropped"),
    "--kv-unified": Idle("all requests share one pool of blocks"),
    "-kvu": Idle("all requests share one pool of blocks"),
    "--disable-frontend-multiprocessing": Idle("one process answers HTTP"),
    "--disable-fastapi-docs": Idle("there are no such pages"),
    "--decode-context-parallel-size": Idle("a request's cache is not divided", ("1",)),
    "--load-format": Idle(
        "a checkpoint's form is found in its files", (AUTO, *OWN_FORMATS, *QUANTISED_FORMATS)
    ),
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

LENGTH_FLAGS: Mapping[str, str] = dict.fromkeys(
    ("--ctx-size", "-c", "--num-ctx"), "the longest request is --max-model-len N"
)
"""For a command that has --max-model-len."""

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
