"""A model whose weights tests store in other forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose columns are whole blocks of 64, of no larger block and of no k-group."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("dense")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
