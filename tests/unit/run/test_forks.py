"""This module tests programs that are forks of a process which has imported what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.kit import ends

# A program, and what makes it: multiprocessing has one fork server in a process, so the maker is one of its own.
PROGRAM = """
    import atexit, json, os, sys, time
    atexit.register(print, "at exit")
    print(json.dumps({
        "arguments": sys.argv[1:],
        "environment": {name: os.environ.get(name) for name in ("OWN", "SERVERS", "MAKERS")},
        "loaded": sys.modules["slow"].SEEN,
        "leads its session": os.getsid(0) == os.getpid(),
        "name": __name__,
        "parent": os.getppid(),
    }), flush=True)
    if "wait" in sys.argv:
        time.sleep(600)
    sys.exit(7)
"""
SLOW = "import os; SEEN = os.environ.get('SERVERS')"
MAKER = """
    import os, signal, subprocess, sys
    from pathlib import Path
    from rl.run.forks import Forks
    def make():
        os.environ["MAKERS"] = "m"
        forks = Forks("slow", environment={"SERVERS": "s"})
        assert "SERVERS" not in os.environ
        log = Path("log")
        if sys.argv[1] == "die":
            print(forks.start("program", ["wait"], {**os.environ}, log).pid, flush=True)
            while not log.exists() or "parent" not in log.read_text():
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        first = forks.start("program", ["two words"], {**os.environ, "OWN": "o"}, log)
        assert first.wait(60) == first.poll() == first.returncode == 7
        second = forks.start("program", ["wait"], {**os.environ}, log)
        assert second.poll() is None
        try:
            second.wait(0.1)
        except subprocess.TimeoutExpired:
            second.terminate()
        assert second.wait(60) == -signal.SIGTERM
        assert forks.start("no_such_program", [], {**os.environ}, log).wait(60) == 1
    if __name__ == "__main__":
        make()
"""


def make(directory: Path, what: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("program", PROGRAM), ("slow", SLOW), ("maker", MAKER)):
        (directory / f"{name}.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "maker.py", what]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def test_a_fork_is_the_program_that_was_asked_for(tmp_path: Path) -> None:
    done = make(tmp_path, "live")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    told = json.loads(lines[0])
    assert told.pop("parent") not in (os.getpid(), 1)
    assert told == {
        "arguments": ["two words"],
        "environment": {"OWN": "o", "SERVERS": None, "MAKERS": "m"},
        "loaded": "s",
        "leads its session": True,
        "name": "__main__",
    }
    assert lines[1] == "at exit"
    assert json.loads(lines[2])["environment"]["OWN"] is None
    assert "No module named no_such_program" in lines[-1]


def test_forks_end_with_the_process_that_has_made_them(tmp_path: Path) -> None:
    done = make(tmp_path, "die")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ends(int(done.stdout))
