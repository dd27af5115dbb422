"""Type the commands of a document, and print them with what they say and how long they take.

    .venv/bin/python -m tests.type_document docs/traces.md

Commands are the lines of indented blocks that begin with "$ ", with the lines that a backslash continues. One shell
runs them in the repository's root, and the first one that fails ends it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rollout import program

ROOT = Path(__file__).resolve().parents[1]


def commands(document: Path) -> list[str]:
    """Return the commands of a document, in order."""
    return re.findall(r"^    \$ ((?:.*\\\n)*.*)", document.read_text(), re.MULTILINE)


def script(document: Path) -> str:
    """Return a shell script that shows each command, runs it, and says how many seconds it took."""
    lines = ["set -e"]
    for command in commands(document):
        shown = shlex.quote(f"$ {command}")
        lines += [f"printf '%s\\n' {shown}", "began=$SECONDS", command, 'printf "# %d s\\n\\n" $((SECONDS - began))']
    return "\n".join(lines)


def main() -> int:
    """Run the commands and return the exit status of the last one."""
    parser = program.parser("python -m tests.type_document", __doc__)
    parser.add_argument("document", type=Path)
    args = parser.parse_args()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    shell = ["bash", "-c", script(args.document)]
    return subprocess.run(shell, cwd=ROOT, env={**os.environ, "PATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
