"""All forms, and which one a chat template shows."""

from __future__ import annotations

from llmpq.runtime.serve.parsers.deepseek_calls import DeepSeek, DeepSeekV4, DeepSeekV32
from llmpq.runtime.serve.parsers.gemma_calls import FunctionGemma, Gemma
from llmpq.runtime.serve.parsers.glm_calls import Glm
from llmpq.runtime.serve.parsers.granite_calls import Granite
from llmpq.runtime.serve.parsers.harmony import HARMONY, is_harmony
from llmpq.runtime.serve.parsers.hermes_calls import Hermes
from llmpq.runtime.serve.parsers.kimi_k2_calls import KimiK2
from llmpq.runtime.serve.parsers.llama3_calls import Llama3
from llmpq.runtime.serve.parsers.minimax_calls import MiniMax
from llmpq.runtime.serve.parsers.mistral_calls import Mistral
from llmpq.runtime.serve.parsers.pythonic_calls import Olmo3, Pythonic
from llmpq.runtime.serve.parsers.qwen3_coder_calls import Qwen3Coder, SeedOss
from llmpq.runtime.serve.parsers.tool_form import ToolForm

_FORMS: tuple[ToolForm, ...] = (
    # Those that share marks with another, but are more particular, first.
    KimiK2(),
    DeepSeekV32(),
    DeepSeekV4(),
    DeepSeek(),
    MiniMax(),
    SeedOss(),
    Gemma(),
    FunctionGemma(),
    Mistral(),
    Granite(),
    Qwen3Coder(),
    Glm(),
    Hermes(),
    Olmo3(),
    Pythonic(),
    Llama3(),
)
FORMS = {form.name: form for form in _FORMS}
NAMES = ("auto", *sorted((*FORMS, HARMONY)))
"""What `--tool-call-parser` may be."""
ALIASES = {
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "phi4_mini_json": "granite",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "minimax_m2": "minimax",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "openai": HARMONY,
    "gemma4": "gemma",
}
"""vLLM's names of the same forms."""


def tool_form(wanted: str, template: str) -> ToolForm | None:
    """Return the form that was asked for, or that a template shows; None for none.

    Harmony has no form of its own here: its channels are read as a whole (`harmony.py`).
    """
    if wanted != "auto":
        return FORMS.get(wanted)
    if is_harmony(template):
        return None
    return next((form for form in _FORMS if form.is_in(template)), None)
