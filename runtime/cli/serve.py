"""`llmpq-dist serve`: flags to a server that answers until SIGTERM."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import name_of, require_named
from llmpq.commands.input_text import text_of
from llmpq.commands.output_paths import check_files
from llmpq.plans.topology import Topology
from llmpq.runtime.cli.plan_file import load_engines, load_plan
from llmpq.runtime.cli.serve_flags import ServeOptions
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.serve.settings import ServeSettings


def main(options: ServeOptions) -> int:
    """Serve; 0 once it has ended in order."""
    options = _with_source(options)
    _check_replicas(options)
    options = _with_engines(options)
    settings = settings_of(options)
    from llmpq.runtime.serve.log_thread import lines_apart
    from llmpq.runtime.serve.server import listening, serve
    from llmpq.runtime.serve.service import Service

    if options.no_access_log:
        logging.getLogger("llmpq.serve.access").setLevel(logging.WARNING)
    if not options.host.strip():  # as where a variable is not set: --host "$HOST"
        raise ValueError(
            "--host is empty, which is every address of this machine: give 0.0.0.0 for those, or "
            "leave it out for 127.0.0.1"
        )
    if not 0 < options.port < 65536:
        raise ValueError(f"--port must be 1 to 65535, got {options.port}")
    if settings.uds is None:
        for taken in listening(options.host, options.port):  # said before a plan is made
            taken.close()
    else:
        _require_free_socket(settings.uds)
    if options.engine.trace is not None:
        check_files({"--plan": options.plan}, {"--trace": str(options.engine.trace)})
    _use_descriptors()
    where: dict[str, Any] = {"host": options.host, "port": options.port}
    with lines_apart():
        if options.replicas > 1:
            from llmpq.runtime.cli.replica_launches import launches_of
            from llmpq.runtime.serve.replicas.replica_server import serve_replicas

            failure = serve_replicas(settings, launches_of(options), **where)
        else:
            failure = serve(Service(settings), lambda: open_engine(options), **where)
    if failure is not None:
        raise failure
    return 0


def _with_source(options: ServeOptions) -> ServeOptions:
    """Take the word without a flag for the model, as in `serve DIR`."""
    if options.source is None:
        return options
    if options.model is not None and options.model != options.source:
        raise ValueError(
            f"'{options.source}' and --model '{options.model}' name two models: give one of them"
        )
    return replace(options, model=options.source)


def _with_engines(options: ServeOptions) -> ServeOptions:
    """Count the engines of a plan of several as replicas."""
    if options.plan is None:
        return options
    plan = load_engines(options.plan)
    if not isinstance(plan, Topology):
        return options
    if options.replicas != 1:
        raise ValueError(
            f"--replicas {options.replicas}: the plan has {len(plan.engines)} engines of its own; "
            "leave --replicas out"
        )
    if options.engine.trace is not None:
        raise ValueError(
            f"--trace has no effect with a plan of {len(plan.engines)} engines; trace a server of "
            "one engine"
        )
    return replace(options, replicas=len(plan.engines))


def _check_replicas(options: ServeOptions) -> None:
    if options.replicas < 1:
        raise ValueError(f"--replicas must be at least 1, got {options.replicas}")
    if options.replicas > 1 and (
        options.engine.ray_address is not None or options.engine.backend == "ray"
    ):
        raise ValueError(
            "--replicas are processes on this machine: leave --ray-address and --backend ray out, "
            "or run one server without --replicas over that Ray"
        )


API_KEYS = ("LLMPQ_API_KEY", "VLLM_API_KEY")
"""Variables of which the first that is set holds the key of a server without `--api-key` and
`--api-key-file`."""


def settings_of(options: ServeOptions) -> ServeSettings:
    """Return the server's settings; `ValueError` for files that cannot be read."""
    template, server = options.chat_template, options.server
    for name in ("max_requests", "max_prompts", "max_n", "max_body_bytes"):
        value = getattr(server, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if server.max_stored_responses < 0:
        raise ValueError(
            f"--max-stored-responses must be 0 or more, got {server.max_stored_responses}"
        )
    for name in ("request_timeout", "read_timeout", "write_timeout", "drain_timeout"):
        seconds = getattr(server, f"{name}_s")
        if seconds is None:
            continue
        flag, least = f"--{name.replace('_', '-')}", "from" if name == "drain_timeout" else "above"
        if not 0 <= seconds < float("inf") or (seconds == 0 and least == "above"):
            without = "; leave it out for no limit" if name == "request_timeout" else ""
            on = " on" if least == "from" else ""
            raise ValueError(f"{flag} must be seconds {least} 0{on}, got {seconds:g}{without}")
    _check_tls(server)
    names = tuple(options.served_model_name or (_folder_name(options),))
    if not all(name.strip() for name in names):
        raise ValueError(
            "--served-model-name is empty; give a name, or leave it out for the folder's"
        )
    return replace(
        server,
        model_names=names,
        api_keys=_api_keys(options),
        # Each replica would have its own.
        max_stored_responses=0 if options.replicas > 1 else server.max_stored_responses,
        root_path=_root_path(server.root_path),
        cors_origins=tuple(map(_origin, server.cors_origins)),
        chat_template=None if template is None else text_of("--chat-template", template),
    )


def _api_keys(options: ServeOptions) -> tuple[str, ...]:
    """Return the keys that open the server; `ValueError` where one is meant and there is none."""
    keys = {"--api-key": list(options.api_key or ())}
    if options.api_key_file is not None:
        lines = [
            line.strip()
            for line in text_of("--api-key-file", options.api_key_file).splitlines()
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not lines:
            raise ValueError(f"--api-key-file '{options.api_key_file}' has no key; one a line")
        keys["--api-key-file"] = lines
    variable = next((name for name in API_KEYS if name in os.environ), None)
    if variable is not None and options.api_key is None and options.api_key_file is None:
        keys[variable] = [os.environ[variable]]
    for source, found in keys.items():
        # The server would be open to all, as where a variable is not set: --api-key "$KEY".
        if any(not key.strip() for key in found):
            raise ValueError(f"{source} is empty; give a key, or leave it out for an open server")
        if not all(key.strip().isprintable() for key in found):
            raise ValueError(f"a key of {source} has a line break or the like, which no header has")
    return tuple(key.strip() for found in keys.values() for key in found)


def _origin(given: str) -> str:
    """Return an origin as browsers write it: lower case, no path, no port that the scheme has."""
    from urllib.parse import urlsplit

    if given in ("*", "null"):
        return given
    try:
        parts = urlsplit(given.lower())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    host, rest = parts.hostname, (parts.path.strip("/"), parts.query, parts.fragment)
    if not parts.scheme or not host or any(rest) or parts.username is not None:
        raise ValueError(
            f"--cors-origin must be an origin such as https://app.example.com, got '{given}'"
        )
    shown = f"[{host}]" if ":" in host else host
    own = port is None or port == {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{shown}{'' if own else f':{port}'}"


def _folder_name(options: ServeOptions) -> str:
    """Return what the model is called where nothing else is said: its folder's name."""
    if options.model is not None:
        require_named(options.model)
        return (
            name_of(options.model) if is_model(options.model) else options.model.partition("@")[0]
        )
    if options.plan is not None:
        return load_engines(options.plan).model.name
    raise ValueError("nothing to serve; give --model DIR or --plan PLAN")


def open_engine(options: ServeOptions) -> LLM:
    """Return the engine that one server answers from; it is planned, and nothing is loaded."""
    return LLM(
        options.model,
        plan=None if options.plan is None else load_plan(options.plan),
        options=options.engine,
        start=False,
        use_tqdm=False,  # lines, as its log has
        stages_apart=True,  # streams and steps would share an interpreter
    )


def _root_path(given: str) -> str:
    path = given.rstrip("/")
    if path and not path.startswith("/"):
        raise ValueError(f"--root-path must begin with /, got '{given}'")
    return path


def _check_tls(server: ServeSettings) -> None:
    """Raise `ValueError` for certificates that cannot be used, before a model is loaded."""
    import ssl

    certificate, key = server.ssl_certfile, server.ssl_keyfile
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(server, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        return
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if path is not None and not os.access(path, os.R_OK):
            there = "it may not be read" if Path(path).exists() else "there is no such file"
            raise ValueError(f"{flag} '{path}' cannot be used: {there}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # No one is asked for a password: a server starts on its own.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--ssl-certfile '{certificate}'{f' with --ssl-keyfile {key!r}' if key else ''} cannot "
            f"be used: {error}; expected a PEM certificate and its key without a password"
            f"{'' if key else ', in the same file or by --ssl-keyfile FILE'}"
        ) from None
    authorities = server.ssl_ca_certs
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except (OSError, ValueError) as error:
            raise ValueError(f"--ssl-ca-certs '{authorities}' cannot be used: {error}") from None
    wanted = server.ssl_cert_reqs
    if wanted and authorities is None:
        raise ValueError(f"--ssl-cert-reqs {wanted} needs --ssl-ca-certs")


MOST_DESCRIPTORS = 1 << 16


def _use_descriptors() -> None:
    """Use as many file descriptors as this user may: a connection takes one, 1,024 are usual."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _require_free_socket(path: str) -> None:
    """Refuse a socket that cannot be made, or at which another server listens."""
    import socket
    import stat

    if not hasattr(socket, "AF_UNIX") or len(path.encode()) > 107:
        raise ValueError(f"--uds '{path}' is longer than the 107 bytes of a socket's path")
    if not Path(path).parent.is_dir():
        raise ValueError(f"--uds '{path}': there is no folder '{Path(path).parent}'")
    if not os.access(Path(path).parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"--uds '{path}': this user may not write in '{Path(path).parent}'; choose another path"
        )
    if not Path(path).exists():
        return
    if not stat.S_ISSOCK(Path(path).stat().st_mode):
        raise ValueError(f"--uds '{path}' is a file and no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # one that a server has left behind
    raise ValueError(f"another server listens at --uds '{path}'; choose another path")
