"""The shell scripts that boxes run in their pods' two containers, which are the parts of stages.sh."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = re.sub(r"(?m)^ *# .*\n", "", Path(__file__).with_name("stages.sh").read_text())
_PARTS = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)\n(?=\n##|\Z)", _TEXT + "\n"))


def stage(*names: str) -> str:
    """Return some parts, one after another, as one script."""
    return "\n".join(_PARTS[name] for name in names)
