"""HTML from the viewer's templates: all values are escaped, and what has no template of its own is written as text."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2

from rl.view import texts
from rl.view.turns import Part, Turn

_HERE = Path(__file__).parent
_NEW_FILE = ("content", "file_text")  # arguments of tools that write files
_LONG = 200  # characters of an argument that has its own block


def url(path: str, **query: Any) -> str:
    """Return an address of ours. Values that are None or empty are left out."""
    known = {key: value for key, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(known)}" if known else path


def plain(value: Any) -> str:
    """Return a value as JSON text that people read."""
    return json.dumps(value, indent=1, ensure_ascii=False, default=repr)


def number(value: Any, digits: int = 2) -> str:
    """Return a number as people read it; a dash for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\u2013"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) < 0.01:
        return f"{value:.1g}"
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else digits}f}"


def signed(value: float | None) -> str:
    """Return an advantage; a dash for none."""
    return "\u2013" if value is None else "0" if value == 0 else f"{value:+.3f}".replace("-", "\u2212")


def percent(value: float | None) -> str:
    """Return a share; a dash for none."""
    return "\u2013" if value is None else f"{100 * value:.0f} %"


def when(value: float) -> str:
    """Return a Unix time as this machine's."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else "\u2013"


def tone(facts: dict[str, Any]) -> str:
    """Return the class of a verdict's colour."""
    return "good" if facts["resolved"] else "infra" if facts["infra"] else "bad"


def gist(turn: Turn) -> str:
    """Return a turn in a few words: the tools that it calls, or how its text begins."""
    calls = [part.name + (f" {_object(part)}" if _object(part) else "") for part in turn.parts if part.kind == "call"]
    said = next((part.text for part in turn.parts if part.kind == "text" and part.text.strip()), "")
    told = ", ".join(calls) or said or next((part.text for part in turn.parts), "") or "(nothing)"
    return texts.clean(" ".join(told[:400].split()))[:90]


def _object(part: Part) -> str:
    """Return what a call is about: a command, a path, a pattern, a description."""
    for key in ("command", "file_path", "path", "pattern", "description", "url", "query"):
        if isinstance(value := part.arguments.get(key), str):
            return value.rpartition("/")[2] if key in ("file_path", "path") else value
    return ""


def arguments(part: Part) -> list[tuple[str, str, Any]]:
    """Return a call's arguments as (name, how to show it, value): diff, code or word."""
    given = dict(part.arguments)
    out: list[tuple[str, str, Any]] = []
    if isinstance(given.get("old_string"), str) and isinstance(given.get("new_string"), str):
        lines = texts.compared(given.pop("old_string"), given.pop("new_string"))
        out.append(("change", "diff", lines[:400]))
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
        long = "\n" in text or len(text) > _LONG or key in (*_NEW_FILE, "command", "prompt")
        out.append((texts.clean(key), "code" if long else "word", texts.cut(text) if long else texts.clean(text)))
    return sorted(out, key=lambda one: one[1] != "word")


@functools.cache
def style() -> tuple[str, str]:
    """Return the style sheet and its hash for a content-security policy, for a file that stands alone."""
    text = (_HERE / "static" / "view.css").read_text()
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters.update({
        "clean": texts.clean, "number": number, "signed": signed, "percent": percent, "when": when, "cut": texts.cut,
        "visible": texts.visible,
    })  # fmt: skip
    shared: dict[str, Any] = {
        "url": url, "tone": tone, "gist": gist, "arguments": arguments, "patch_files": _patch, "style": style,
    }  # fmt: skip
    made.globals.update(shared)
    return made


def _patch(data: bytes | str | None) -> list[texts.DiffView]:
    return texts.patch(data.decode("utf-8", "replace") if isinstance(data, bytes) else data or "")


def page(name: str, **values: Any) -> str:
    """Return a filled template."""
    return _environment().get_template(name).render(**values)
