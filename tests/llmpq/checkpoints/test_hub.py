"""Models by their name on the hub: downloaded from one that runs here, found in its cache again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmpq.checkpoints.hub import at_revision, local_model, name_of
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.sources import CheckpointSource

pytestmark = [pytest.mark.cpu]
ROOT = Path(__file__).resolve().parents[3]
COMMIT, OLDER = "a" * 40, "b" * 40
DEMO = {path.name: path.read_bytes() for path in (ROOT / "examples" / "demo-7m").iterdir()}
REPOS = {
    "me/demo": {**DEMO, "original/params.json": b"{}", "consolidated.pth": b"0"},
    "me/demo-GGUF": {"demo-Q8_0.gguf": b"GGUF....", "README.md": b"hi"},
    "me/old": {"config.json": DEMO["config.json"], "pytorch_model.bin": b"0"},
    "me/none": {"README.md": b"hi"},
    "me/unlisted": {"README.md": b"hi"},
}
GET = """
import json, sys
from llmpq.checkpoints.hub import at_revision, local_model
for name, only, revision in json.loads(sys.argv[1]):
    try:
        path = local_model(at_revision(name, revision), config_only=only)
        print(json.dumps([str(path), sorted(p.name for p in path.parent.iterdir())
                          if path.is_file() else sorted(p.name for p in path.iterdir())]))
    except ValueError as error:
        print(json.dumps(["ValueError", str(error)]))
"""


class Hub(BaseHTTPRequestHandler):
    """The two questions that a download asks: a repository's files, and one of them."""

    asked: list[str] = []  # noqa: RUF012

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if repo == "me/gated":
                return self._say(403, b"", {"X-Error-Code": "GatedRepo"})
            if repo not in REPOS:
                return self._say(401, b"", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("main", "v1", COMMIT, OLDER):
                return self._say(404, b"", {"X-Error-Code": "RevisionNotFound"})
            sha = OLDER if revision in ("v1", OLDER) else COMMIT
            if len(parts) > 4 and parts[4] == "tree":
                if repo == "me/unlisted":
                    return self._say(403, b"", {"X-Error-Message": "not from this address"})
                files = [
                    {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                    for n, b in REPOS[repo].items()
                ]
                return self._say(200, json.dumps(files).encode(), {})
            files = [{"rfilename": name} for name in REPOS[repo]]
            return self._say(200, json.dumps(
                {"id": repo, "sha": sha, "siblings": files, "private": False, "downloads": 0,
                 "tags": []}
            ).encode(), {})  # fmt: skip
        repo, file = "/".join(parts[:2]), "/".join(parts[4:])
        body = REPOS.get(repo, {}).get(file)
        if body is None:
            return self._say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        commit = OLDER if parts[3] in ("v1", OLDER) else COMMIT
        return self._say(200, body, {
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit,
        })  # fmt: skip

    def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that has this hub and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    server.shutdown()


def got(environment: dict[str, str], *asked: tuple[str, bool, str | None]) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", GET, json.dumps(asked)],
        env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_models_come_from_the_hub_and_then_from_its_cache(hub):
    config, whole, gguf, pinned, tagged = got(
        hub, ("me/demo", True, None), ("me/demo", False, None),
        ("me/demo-GGUF/demo-Q8_0.gguf", False, None), (f"me/demo@{OLDER}", False, None),
        ("me/demo", True, "v1"),
    )  # fmt: skip
    assert "config.json" in config[1] and "model.safetensors" not in config[1]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(whole[1])
    assert "consolidated.pth" not in whole[1] and "original" not in whole[1]
    assert config[0] == whole[0] and whole[0].endswith(f"models--me--demo/snapshots/{COMMIT}")
    assert gguf[0].endswith(f"snapshots/{COMMIT}/demo-Q8_0.gguf") and Path(gguf[0]).is_symlink()
    assert pinned[0].endswith(OLDER) and tagged[0].endswith(OLDER)
    assert name_of(whole[0]) == "demo" and local_model(gguf[0]) == Path(gguf[0])
    offline = {**hub, "HF_HUB_OFFLINE": "1"}
    assert got(offline, ("me/demo", False, None), ("me/demo-GGUF/demo-Q8_0.gguf", False, None)) == [
        whole, gguf,
    ]  # fmt: skip
    ((kind, text),) = got(offline, ("me/demo-GGUF", False, None))
    assert kind == "ValueError" and "name one, as in me/demo-GGUF/demo-Q8_0.gguf" in text


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("me/nothing", None, "no such model"),
        ("me/gated", None, "licence"),
        ("me/demo", "v9", "no revision 'v9'"),
        ("me/demo-GGUF", None, "me/demo-GGUF/demo-Q8_0.gguf"),
        ("me/demo-GGUF/other.gguf", None, "no file 'other.gguf'"),
        ("me/old", None, "llmpq-dist convert"),
        ("me/none", None, "no config.json"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(hub, name, revision, said):
    ((kind, text),) = got(hub, (name, False, revision))
    assert kind == "ValueError" and said in text and "\n" not in text


def test_a_hub_that_lists_no_files_is_quoted(hub):
    """It was said not to be reached."""
    ((kind, text),) = got(hub, ("me/unlisted", False, None))
    assert kind == "ValueError" and "not from this address" in text and "\n" not in text
    assert "cannot be reached" not in text


def test_without_network_a_sentence_has_the_command_to_type(hub, tmp_path):
    for more in (
        {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"},
    ):  # fmt: skip
        ((kind, text),) = got({**hub, "HF_HOME": str(tmp_path), **more}, ("me/new", False, "v1"))
        assert kind == "ValueError" and text.endswith("hf download me/new --revision v1")


@pytest.mark.parametrize("folder", ["models", "./models", "{here}/models", "."])
def test_a_slip_is_answered_with_the_model_beside_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("demo-7m", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "models" if folder == "." else tmp_path)
    folder = folder.format(here=tmp_path)
    for slip in ("demo7m", "demo-7", "Demo-7M-"):
        near = str(Path(folder, "demo-7m"))
        with pytest.raises(ValueError, match=f"no such model.*did you mean '{near}'"):
            local_model(f"{folder}/{slip}")
    with pytest.raises(ValueError, match="no such model") as caught:
        local_model(f"{folder}/zzz")
    assert "did you mean" not in str(caught.value)


def test_a_file_that_is_no_model_is_said_to_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("me").mkdir()
    Path("me/prompts.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="'me/prompts.jsonl' is a file, and its name does not"):
        local_model("me/prompts.jsonl")


def test_paths_are_no_names_of_the_hub(tmp_path):
    for path in ("nowhere", "./me/demo", "/me/demo", "a/b/c", str(tmp_path / "x"), "me/x.gguf"):
        with pytest.raises(ValueError, match="no such model directory"):
            local_model(path)
    for path in (tmp_path, "qwen3-32b", "me/demo@v1"):
        with pytest.raises(ValueError, match="no effect"):
            at_revision(path, "main")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/demo-GGUF:Q4_K_M", "named with its repository: me/demo-GGUF/FILE.gguf"),
        ("hf.co/me/demo-GGUF:Q4_K_M", "named with its repository: me/demo-GGUF/FILE.gguf"),
        ("https://huggingface.co/me/demo", "named without its address: me/demo"),
    ],
)
def test_names_of_other_programs_lead_to_ours(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}$"):
        local_model(name)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Qwen3-32B", "Qwen/Qwen3-32B"),
        ("no-such", "Qwen/Qwen3-0.6B"),
        ("qwen3:32b", "Qwen/Qwen3-32B"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B"),
    ],
)
def test_a_name_that_can_be_planned_leads_to_its_weights(name: str, where: str) -> None:
    with pytest.raises(ValueError, match=f"hub such as {where}$"):
        local_model(name)


def cached(cache: Path) -> Path:
    """Lay a repository out as Hugging Face's cache does; return its snapshot."""
    snapshot = cache / "models--me--demo" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in DEMO.items():
        blob = cache / "models--me--demo" / "blobs" / f"blob-of-{name}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("outer", ["", "models--me--demo", "models--me--demo/snapshots"])
def test_a_folder_around_a_model_leads_to_it(outer, tmp_path):
    snapshot = cached(tmp_path)
    with pytest.raises(ValueError, match=f"no model itself: give one in it, such as '{snapshot}'"):
        ModelSpec.from_directory(local_model(tmp_path / outer))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_that_leads_nowhere_is_called_so(name, tmp_path):
    snapshot = cached(tmp_path)
    (tmp_path / "models--me--demo" / "blobs" / f"blob-of-{name}").unlink()
    with pytest.raises(ValueError, match=f"{name}' is a broken link: '.*blob-of-{name}' is not"):
        CheckpointSource(snapshot, ModelSpec.from_directory(snapshot))
        Tokenizer(snapshot)
    link = tmp_path / "m.gguf"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"m.gguf' is a broken link: '.*nowhere'"):
        local_model(link)
