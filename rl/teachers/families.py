"""Families of models, told from their names. A teacher of the recorded model's own family teaches it little."""

from __future__ import annotations

import re

# Words in names of models, by the family that they stand for; the first that is found decides.
_FAMILIES = {
    "claude": ("claude", "opus", "sonnet", "haiku"),
    "gpt": ("gpt", "chatgpt", "codex", "o1", "o3", "o4"),
    "gemini": ("gemini", "gemma"),
    "qwen": ("qwen", "qwq"),
    "deepseek": ("deepseek",),
    "llama": ("llama",),
    "mistral": ("mistral", "mixtral", "devstral", "codestral", "magistral", "ministral"),
    "glm": ("glm",),
    "kimi": ("kimi", "moonshot"),
    "minimax": ("minimax",),
    "grok": ("grok",),
    "nemotron": ("nemotron",),
}


def family_of(model: str) -> str:
    """Return the family of a model's name; for a name that is not known, its first word. Empty for an empty name.

    A derived model counts as what its own name says first: DeepSeek-R1-Distill-Qwen is of deepseek's.
    """
    words = re.findall(r"[a-z]+\d?", model.lower().rpartition("/")[2])
    for word in words:
        for family, names in _FAMILIES.items():
            if any(word == name or (len(name) > 2 and word.startswith(name)) for name in names):
                return family
    return words[0] if words else ""
