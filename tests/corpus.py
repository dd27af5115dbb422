"""This program fetches recorded conversations that other people have published, for tests/integration/traces.

    .venv/bin/python -m tests.corpus [--from DIR]     # into .corpus, which git ignores

--from: out of clones, DIR/OWNER+NAME/repo, instead of the network.
They are facts of others and stay out of this repository.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / ".corpus"


class Source(NamedTuple):
    """Files of a repository at a commit: ``format`` as `rl.ingest` names it; ``replies`` counts those of a file."""

    format: str
    repository: str
    commit: str
    pattern: str
    replies: Callable[[Path], int]

    @property
    def place(self) -> Path:
        return CORPUS / self.format / self.repository.replace("/", "+")


def of_trajectory(file: Path) -> int:
    """Steps with a reply, or, of a demonstration, the replies of its history."""
    found: Any = json.loads(file.read_text())
    if found.get("trajectory") is None:
        return sum(one["role"] == "assistant" and not one.get("is_demo") for one in found["history"])
    return sum(bool(step.get("response") or step.get("action")) for step in found["trajectory"])


def of_messages(file: Path) -> int:
    found: Any = json.loads(file.read_text())
    messages = found["messages"] if isinstance(found, dict) else found
    return sum(one["role"] == "assistant" for one in messages)


def of_session(file: Path) -> int:
    """Different ids of assistant messages."""
    names = set()
    for text in file.read_text().splitlines():
        try:
            line: Any = json.loads(text)
            if line["type"] == "assistant" and isinstance(line["message"], dict):
                names.add(line["message"].get("id") or line["uuid"])
        except (ValueError, KeyError, TypeError):
            continue
    return len(names)


SOURCES = (
    Source("swe-agent", "SWE-agent/SWE-agent", "3ea751c087f32b16e039a2233dd6eefecef325d5", "*.traj", of_trajectory),
    Source(
        "swe-agent", "SWE-agent/mini-swe-agent", "a83fcae82d2a08f0ee0c688f9d137b3566c097f8", "*.traj.json", of_messages
    ),
    Source(
        "claude-code",
        "daaain/claude-code-log",
        "a641071a154f041b96e9b83ccd42d2f92eaa321a",
        "*/test_data/*.jsonl",
        of_session,
    ),
)


def fetch(source: Source, clone: Path) -> int:
    """Copy the files of a source out of a clone; return how many."""

    def git(*what: str) -> bytes:
        return subprocess.run(["git", "-C", str(clone), *what], capture_output=True, check=True).stdout

    names = [one for one in git("ls-tree", "-r", "-z", "--name-only", source.commit).decode().split("\0") if one]
    wanted = [one for one in names if fnmatch(one, source.pattern)]
    for name in wanted:
        target = source.place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(git("show", f"{source.commit}:{name}"))
    return len(wanted)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("--from", type=Path, dest="clones")
    given = parser.parse_args(arguments)
    for source in SOURCES:
        with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
            clone = Path(scratch)
            if given.clones:
                clone = given.clones / source.repository.replace("/", "+") / "repo"
            else:
                url = f"https://github.com/{source.repository}"
                subprocess.run(
                    ["git", "clone", "--quiet", "--no-checkout", "--filter=blob:none", url, scratch], check=True
                )
            print(f"{fetch(source, clone):>5} files of {source.repository} in {source.place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
