"""This module tests what reading a large session file costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.ingest_kit import session, write_session
from tests.integration.process_kit import ROOT

# ru_maxrss would be that of the process which has started this one.
PEAK = """
import pathlib, re, sys
from rl.ingest import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A session of 1 GiB that is compacted again and again, with a line of 10 MB in it."""
    file = tmp_path / "a.jsonl"
    turns = write_session(file, turns=0, text="a line of a file\n" * 1000, size=1 << 30, compact_every=50)
    with open(file, "a") as out:
        last = session(turns=2, text="z" * 10_000_000, name="long")
        out.writelines(json.dumps(line) + "\n" for line in last)
    command = [sys.executable, "-c", PEAK, "claude-code", str(file), "--out", str(tmp_path / "s.jsonl.zst")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{turns + 2:,}  states" in done.stdout
    assert int(done.stdout.split()[-1]) < 200 * 1024, done.stdout
