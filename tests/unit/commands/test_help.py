"""Every program says what it does in plain words, and ends quietly when nobody reads any more."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rl.quickstart.policy import make_tokenizer
from rollout import audit
from rollout.program import UNREAD, plain
from rollout.records import NodeRecord, Record, RecordWriter, pack_floats, pack_ids
from tests.kit import empty_record

ROOT = Path(__file__).parents[3]
MAIN = 'if __name__ == "__main__"'
# What other programs start, with arguments of their own, and what takes none.
NOT_FOR_USERS = {
    "rl/run/fork_server.py",
    "rl/cpu/api_server.py",
    "rl/cluster/probe.py",
    "rl/sft/dpo.py",
    "scripts/budget.py",
    "examples/hosted_box/hosted_box/relay.py",
    "examples/own_agent/own_agent/loop.py",
}
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for top in ("rl", "rollout", "rewards", "scripts", "examples")
    for path in (ROOT / top).rglob("*.py")
    if MAIN in path.read_text() and str(path.relative_to(ROOT)) not in NOT_FOR_USERS
)
# As programs they set handlers of signals, for this process; these calls print their help.
HANDLERS = {
    "rl/train/__main__.py": "from rl.train.__main__ import main; main()",
    "rl/cluster/__main__.py": "from rl.cluster.task import main; main()",
}


def command(path: str) -> str:
    """Return how a user starts a program."""
    if path.startswith("examples/"):
        return Path(path).name
    if path.startswith("scripts/"):
        return f"python {path}"
    return f"python -m {path.removesuffix('.py').removesuffix('/__main__').replace('/', '.')}"


@pytest.mark.parametrize("path", PROGRAMS)
def test_help_is_worth_reading(path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / path), "--help"])
    monkeypatch.syspath_prepend(str((ROOT / path).parent if path.startswith("scripts/") else ROOT / "scripts"))
    with pytest.raises(SystemExit) as ended:
        if path in HANDLERS:
            exec(HANDLERS[path], {})
        else:
            runpy.run_path(str(ROOT / path), run_name="__main__")
    said = capsys.readouterr()
    assert not ended.value.code and not said.err
    assert "`" not in said.out and command(path) in said.out and len(said.out.splitlines()) > 5


def test_programs_of_the_packages_end_by_one_function() -> None:
    own = [path for path in PROGRAMS if path.startswith(("rl/", "rollout/")) and path != "rl/cluster/__main__.py"]
    assert len(own) > 15
    assert [path for path in own if "program.end(" not in (ROOT / path).read_text().partition(MAIN)[2]] == []


def test_plain_text() -> None:
    assert plain("It reads ``a.b`` and `c`,\n``d\ne``.\n\nMore.\n") == "It reads a.b and c,\nd\ne.\n\nMore."
    assert plain("  a `b`\n  c\n") == "  a b\n  c"
    assert plain(None) == ""


def sampled(ids: list[int], text: str) -> Record:
    nodes = [
        NodeRecord(parent=-1, ids=pack_ids([1, 2])),
        NodeRecord(
            parent=0,
            ids=pack_ids(ids),
            logprobs=pack_floats([-1.0] * len(ids)),
            text=text,
            blocks=[{"type": "text", "text": text}],
            ended=False,
        ),
    ]
    return empty_record(nodes=nodes, parser="hermes")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one episode, sampled from the quickstart's vocabulary, with the tokenizer beside it."""
    tokenizer = make_tokenizer(["a few words to learn from"])
    tokenizer.save_pretrained(tmp_path / "model")
    writer = RecordWriter(tmp_path / "episodes", "one", synced=False)
    writer.append(sampled(tokenizer.encode("some words \u00e9"), "some words \u00e9"))
    writer.close()
    return tmp_path


def python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, **options
    )


SCREEN = """
from rl.run.screen import Screen
with Screen() as screen:
    screen.print('a')
    screen.next(('b', 'c'))
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["-m", "rollout.records", "RUN"], UNREAD),
        (["-m", "rl.train", "--help"], UNREAD),
        (["-c", SCREEN], 7),  # what shows its work goes on with it
    ],
    ids=["records", "train", "screen"],
)
def test_a_closed_pipe_ends_quietly(arguments: list[str], status: int, run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = python(*(one.replace("RUN", str(run)) for one in arguments), stdout=writing)
    os.close(writing)
    _, error = process.communicate()
    assert (process.returncode, error) == (status, "")


def test_another_pipe_that_breaks_is_told() -> None:
    code = "from rollout.program import end\ndef main():\n    raise BrokenPipeError('of a worker')\nend(main)"
    process = python("-c", code, stdout=subprocess.PIPE)
    _, error = process.communicate()
    assert process.returncode == 1 and "of a worker" in error


@pytest.mark.parametrize("name", ["rollout.audit", "rl.view.terminal"])
def test_what_reads_records_imports_no_engine(name: str, run: Path) -> None:
    code = f"""
import sys
from {name} import main
status = main(sys.argv[1:])
print(status, sorted({{"torch", "transformers", "vllm", "verl", "ray"}} & set(sys.modules)))
"""
    model = ["--model", str(run / "model")] if name == "rollout.audit" else []
    process = python("-c", code, str(run), *model, stdout=subprocess.PIPE)
    out, error = process.communicate()
    assert out.splitlines()[-1] == "0 []" and not error, (out, error)


def test_the_audit_decodes_as_transformers_does(run: Path) -> None:
    from transformers import AutoTokenizer

    model = run / "model"
    short, long = audit.tokenizer_of(str(model)), AutoTokenizer.from_pretrained(model)
    assert isinstance(short, Tokenizer)
    every = list(range(len(long)))
    for ids in (every, every[::-1], [*long.encode("\u00e9\u20ac"), 200, 130, 250]):
        assert short.decode(ids, skip_special_tokens=False) == long.decode(ids, skip_special_tokens=False)
    file = model / "tokenizer_config.json"
    told = json.loads(file.read_text())
    told["added_tokens_decoder"] = {str(len(long)): {"content": "<more>", "special": False}}
    file.write_text(json.dumps(told))
    assert not isinstance(audit.tokenizer_of(str(model)), Tokenizer), "transformers adds the tokens that are missing"
