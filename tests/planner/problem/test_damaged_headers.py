"""Headers of GGUF and safetensors files that lie: a sentence with the file's name, at once."""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.checkpoint_codes import checkpoint_codes, with_checkpoint_codes
from llmpq.planner.problem.stored_precisions import stored_layers
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.pure
MOST_S, MOST_MB = 1.0, 100
UINT32, FLOAT32, TEXT = 4, 6, 8
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
}
EXTREMES = (0, -1, 1 << 31, 1 << 40, (1 << 63) - 1, 1.5, -1.0, float("nan"), float("inf"), "x", "")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if 0 <= value < 1 << 32:
        return struct.pack("<II", UINT32, value)
    return struct.pack("<Iq", 11, value)


def gguf_bytes(metadata: dict[str, Any]) -> bytes:
    """A llama of two layers and Q4_0 blocks of zeros."""
    shapes = {
        "token_embd.weight": (199, 64),
        "output_norm.weight": (64,),
        "output.weight": (199, 64),
    }
    for layer in range(2):
        for name, rows, columns in (
            ("attn_q", 64, 64), ("attn_k", 32, 64), ("attn_v", 32, 64), ("attn_output", 64, 64),
            ("ffn_gate", 96, 64), ("ffn_up", 96, 64), ("ffn_down", 64, 96),
        ):  # fmt: skip
            shapes[f"blk.{layer}.{name}.weight"] = (rows, columns)
        shapes |= {f"blk.{layer}.{name}_norm.weight": (64,) for name in ("attn", "ffn")}
    keys = b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    infos, at = b"", 0
    for name, shape in shapes.items():
        kind, size = (2, 18 * shape[-1] // 32 * shape[0]) if len(shape) > 1 else (0, 256)
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", side) for side in shape[::-1])
        infos += struct.pack("<IQ", kind, at)
        at += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata)) + keys + infos
    return head + bytes(-len(head) % 32) + bytes(at)


def safetensors_bytes(header: Any) -> bytes:
    good = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(good).to_bytes(8, "little") + good + bytes(64)


def asked(path: Path, named: Path) -> str | None:
    """Return the refusal of a file, None where it is read: in a sentence, at once, in few bytes."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = None
    try:
        spec = ModelSpec.from_directory(path)
        stored_layers(path, spec)
        with_checkpoint_codes(
            Quantization(), checkpoint_codes(path, spec), spec, (Precision.W4A16,), 2
        )
    except ValueError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 700
        assert named.name in said or str(path) in said or "config.json" in said
    assert time.process_time() - started < MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MB << 10
    return said


def test_the_file_that_is_damaged_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(LLAMA))
    assert asked(path, path) is None


def test_a_file_of_37_bytes(tmp_path: Path) -> None:
    """A key without a name, 2^63 keys, 2^40 tensors, and the file cut behind each of its bytes."""
    path = tmp_path / "a.gguf"
    whole = b"GGUF" + struct.pack("<IQQQIB", 3, 0, 1, 0, 0, 1)
    assert len(whole) == 37
    keys = whole[:16] + struct.pack("<Q", 1 << 63) + whole[24:]
    tensors = whole[:8] + struct.pack("<Q", 1 << 40) + whole[16:]
    for content in (whole, keys, tensors, *(whole[:size] for size in range(37))):
        path.write_bytes(content)
        assert asked(path, path) is not None


def test_lists_that_would_fill_the_memory(tmp_path: Path) -> None:
    """A sparse file of 64 GiB of zeros: a list of its size, and a text of it."""
    path = tmp_path / "a.gguf"
    for kind in (struct.pack("<IIQ", 9, 8, 1 << 32), struct.pack("<IIQ", 9, 0, 1 << 35),
                 struct.pack("<IQ", 8, 1 << 35)):  # fmt: skip
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + kind)
        with path.open("r+b") as file:
            file.truncate(1 << 36)
        assert "truncated or damaged" in (asked(path, path) or "")


@pytest.mark.parametrize("key", LLAMA)
def test_keys_that_are_missing_or_absurd(key: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({k: v for k, v in LLAMA.items() if k != key}))
    said = asked(path, path)
    assert said is None or key in said, "what is missing is named"
    for value in EXTREMES:
        path.write_bytes(gguf_bytes({**LLAMA, key: value}))
        asked(path, path)


def mutations(whole: bytes, header: int, count: int) -> Iterator[bytes]:
    """Yield copies with bytes of the header changed, overwritten by large numbers, or cut out."""
    draw = random.Random(header)
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(header)
            how = draw.random()
            if how < 0.4:
                content[at] = draw.randrange(256)
            elif how < 0.8:
                large = draw.choice((0, 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1))
                content[at : at + 8] = struct.pack("<Q", large)
            else:
                del content[at : at + draw.randrange(1, 20)]
        yield bytes(content)


HEADERS: dict[str, Any] = {
    "a list": [],
    "no JSON": b"{",
    "an entry that is no object": {"model.layers.0.a.weight": 3},
    "no dtype": {"model.layers.0.a.weight": {"shape": [1], "data_offsets": [0, 4]}},
    "a negative size": {
        "model.layers.0.a.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}
    },
    "one offset": {"model.layers.0.a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4]}},
    "a tensor twice": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    "nested without end": b"[" * 100_000,
}


def directory(folder: Path, content: bytes) -> Path:
    """A quantised llama whose only file is this one."""
    config = {
        "model_type": "llama", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "quantization_config": {"quant_method": "compressed-tensors"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(content)
    return folder / "model.safetensors"


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_headers_that_lie(name: str, tmp_path: Path) -> None:
    file = directory(tmp_path, safetensors_bytes(HEADERS[name]))
    said = asked(tmp_path, file)
    assert said is not None and str(file) in said


def good_header() -> dict[str, Any]:
    entry = {"dtype": "I32", "shape": [8, 8], "data_offsets": [0, 8]}
    scale = {"dtype": "F16", "shape": [8, 1], "data_offsets": [0, 8]}
    shape = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
    stem = "model.layers.0.mlp.up_proj"
    return {f"{stem}.weight_packed": entry, f"{stem}.weight_scale": scale,
            f"{stem}.weight_shape": shape}  # fmt: skip


@pytest.mark.parametrize("count", [60, pytest.param(4000, marks=pytest.mark.seldom)])
def test_random_damage(count: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "m.gguf", gguf_bytes(LLAMA)
    for content in mutations(whole, 1400, count):
        path.write_bytes(content)
        asked(path, path)
    good = safetensors_bytes(good_header())
    for content in mutations(good, len(good) - 64, count):
        asked(tmp_path, directory(tmp_path, content))
