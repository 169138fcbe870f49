"""Checkpoints with a head that predicts a further token (MTP), and the head's equation as it is.

Transformers drops such weights. A model of a layer more is made, whose last layer becomes the
head's; the twin runs that layer of Transformers behind the published equation (DeepSeek-V3, arXiv
2412.19437, equations 21 to 25; Qwen3-Next's goes on from what its last norm gives).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose head is a module beside the model."""


@dataclass(frozen=True)
class MtpModel:
    """A checkpoint and what it computes."""

    directory: Path
    whole: Any
    """Transformers' model with the head's layer as its last."""
    parts: dict[str, Tensor]
    """Norms and the joining matrix of the head, as they multiply."""
    normed: bool
    """It goes on from what its last norm gives."""

    @property
    def body(self) -> Any:
        return self.whole.model

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return what the model's output matrix is given [T, h], and the head."""
        layers = self.body.layers
        kept = self.body.layers[: len(layers) - 1]
        self.body.layers, self.whole.config.num_hidden_layers = kept, len(kept)
        try:
            with torch.no_grad():
                return self.body(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        finally:
            self.body.layers, self.whole.config.num_hidden_layers = layers, len(layers)

    def greedy(self, tokens: list[int], new: int) -> list[int]:
        """Return the model's most likely continuation, the head left out."""
        found = list(tokens)
        for _ in range(new):
            found.append(int((self.hidden(found)[-1] @ self.output.t()).argmax()))
        return found[len(tokens) :]

    @property
    def output(self) -> Tensor:
        return self.whole.lm_head.weight.detach()

    def head(self, hidden_Th: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] of the tokens behind `tokens`, and what the head goes on from.

        `tokens`: those behind each hidden state.
        """
        with torch.no_grad():
            token_Th = self.body.embed_tokens(torch.tensor(tokens))
            both = [self.norm(token_Th, "token_norm"), self.norm(hidden_Th, "hidden_norm")]
            x = (torch.cat(both, dim=-1) @ self.parts["join"].t())[None]
            places = torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
            angles = self.body.rotary_emb(x, places)
            out = self.body.layers[-1](
                x, attention_mask=mask, position_ids=places, position_embeddings=angles
            )
            y = (out[0] if isinstance(out, tuple) else out)[0]
            normed = self.norm(y, "norm")
            return normed @ self.output.t(), normed if self.normed else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.whole.config.rms_norm_eps)
        return x * scale * self.parts[name]


def make_mtp_model(folder: Path, family: str, name: str, options: dict[str, Any]) -> MtpModel:
    """Write a checkpoint; `options`: of Transformers' config, of the model without the head."""
    import transformers

    torch.manual_seed(5)
    depth = options["num_hidden_layers"]
    more: dict[str, Any] = {"num_hidden_layers": depth + 1}
    for key, last in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if key in options:
            more[key] = [*options[key], last]
    known = {key: value for key, value in options.items() if key != "model_type"}
    config = getattr(transformers, f"{name}Config")(**{**known, **more})
    with torch.inference_mode(False), torch.no_grad():
        auto, eager = transformers.AutoModelForCausalLM, {"attn_implementation": "eager"}
        if type(config) in auto._model_mapping:
            whole = auto.from_config(config, **eager).eval()
        else:  # mistral4: in no auto class's table
            whole = getattr(transformers, f"{name}ForCausalLM")._from_config(config, **eager).eval()
        named = [*whole.named_parameters()]
        named += [(n, b) for n, b in whole.named_buffers() if n.endswith("correction_bias")]
        for _, tensor in named:
            tensor.copy_(torch.randn_like(tensor) * 0.1 + (tensor if tensor.ndim == 1 else 0))
    whole.save_pretrained(folder)
    hidden, beside = options["hidden_size"], family in SHARED
    parts = {n: 1 + 0.2 * torch.randn(hidden) for n in ("token_norm", "hidden_norm", "norm")}
    parts["join"] = torch.randn(hidden, 2 * hidden) * 0.1
    stored = load_file(folder / "model.safetensors")
    layer = f"model.layers.{depth}."
    if beside:
        stored = {k.replace(layer, "mtp.layers.0."): v for k, v in stored.items()}
        names = {
            "token_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "join": "mtp.fc",
            "norm": "mtp.norm",
        }
    else:
        names = {
            "token_norm": f"{layer}enorm",
            "hidden_norm": f"{layer}hnorm",
            "join": f"{layer}eh_proj",
            "norm": f"{layer}shared_head.norm",
        }
    for part, value in parts.items():
        above_one = 1.0 if beside and part != "join" else 0.0
        stored[f"{names[part]}.weight"] = value - above_one
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    said = json.loads(path.read_text())
    said["num_hidden_layers"] = depth
    said |= {key: options[key] for key in ("model_type", *more) if key in options}
    if not beside:
        said["num_nextn_predict_layers"] = 1
    path.write_text(json.dumps(said))
    return MtpModel(folder, whole, parts, beside)
