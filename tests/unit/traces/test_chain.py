"""The session of docs/traces.md: its commands exist as they are written there."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rl.config.compose import compose
from rl.data.select import _parser
from rl.sft.__main__ import spelled_out
from rl.traces.collect.command import BACKENDS

ROOT = Path(__file__).parents[3]
DOCUMENT = """
Typed:

    $ made=$(echo on\\
    e)
    said before
    $ echo "$made" > word

    $ cat word; false
    $ echo never
"""


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("tests.type_document")


def test_the_keys_of_the_chain_exist(typist: Any) -> None:
    programs = []
    for command in typist.commands(ROOT / "docs" / "traces.md"):
        match shlex.split(command.replace("\\\n", " ")):
            case ["python", "-m", "rl.train" | "rl.quickstart.prepare" as program, *keys]:
                compose(keys)
            case ["python", "-m", "rl.sft" as program, *keys]:
                compose(spelled_out(keys))
            case ["python", "-m", "rollout.collect" as program, backend, "+experiment=quickstart", *keys]:
                compose([*BACKENDS[backend], *keys], "collect")
            case ["python", "-m", "rl.evaluate" as program, "compare", _, _]:
                pass
            case ["python", "-m", "rl.evaluate" as program, *keys]:
                compose([key for key in keys if key != "+experiment=quickstart"], "evaluate")
            case ["python", "-m", "rl.data.select" as program, *options]:
                assert _parser().parse_args(options).resolved
            case other:
                program = ""
                assert other[0].startswith("made="), other
        programs.append(program)
    order = [name for name in dict.fromkeys(programs) if name]
    named = ["rl.quickstart.prepare", "rl.evaluate", "rollout.collect", "rl.data.select", "rl.sft", "rl.train"]
    assert order == named


def test_a_document_is_typed_in_one_shell_up_to_the_first_failure(tmp_path: Path, typist: Any) -> None:
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    done = subprocess.run(["bash", "-c", typist.script(document)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and (tmp_path / "word").read_text() == "on e\n"
    assert done.stdout.splitlines()[-2:] == ["$ cat word; false", "on e"] and "never" not in done.stdout
    assert re.search(r"^# \d+ s$", done.stdout, re.MULTILINE) and "said before" not in done.stdout
