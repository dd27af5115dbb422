"""This module tests the fork server: a fork is, to itself and to others, the process that was asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl.run.fork_server import ForkServer
from tests.kit import ends

SCRIPT = """
import json, os, signal, sys, tempfile
told = {
    "arguments": sys.argv,
    "environment": os.environ.get("OWN"),
    "server's": os.environ.get("ONLY_SERVER"),
    "directory": os.getcwd(),
    "temporary": tempfile.gettempdir(),
    "loaded": "xml.dom.minidom" in sys.modules,
    "name": __name__,
    "input": sys.stdin.read(),
    "blocked": signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "leads its group": os.getpgid(0) == os.getpid(),
    "pid": os.getpid(),
    "parent": os.getppid(),
}
with open(sys.argv[1], "w") as out:
    json.dump(told, out)
print("said")
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("ONLY_SERVER", "1")
    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        made = ForkServer(directory, "xml.dom.minidom")
        made.wait()
        monkeypatch.delenv("ONLY_SERVER")
        yield made
        made.close()


def test_a_fork_goes_on_as_the_process_that_asked(server: ForkServer, tmp_path: Path) -> None:
    script, told, said = tmp_path / "script.py", tmp_path / "told.json", tmp_path / "said"
    script.write_text(SCRIPT)
    (tmp_path / "input").write_text("from a file")
    environment = {**os.environ, "OWN": "value", "TMPDIR": str(tmp_path)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        with open(tmp_path / "input") as stdin, open(said, "w") as stdout:
            command = f"exec {server.executable} {script} {told} 'two words'"
            asked = subprocess.run(
                ["sh", "-c", command], cwd=tmp_path, env=environment, stdin=stdin, stdout=stdout, check=True
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert asked.returncode == 0
    end = time.monotonic() + 60
    while said.read_text() != "said\n":
        assert time.monotonic() < end
        time.sleep(0.02)
    found = json.loads(told.read_text())
    assert found.pop("parent") == server._process.pid
    pid = found.pop("pid")
    assert found == {
        "arguments": [str(script), str(told), "two words"],
        "environment": "value",
        "server's": None,
        "directory": str(tmp_path),
        "temporary": str(tmp_path),
        "loaded": True,
        "name": "__main__",
        "input": "from a file",
        "blocked": True,
        "leads its group": True,
    }
    assert ends(pid, reaped=True), "a fork that has ended is left as a zombie"


STARTS = """
import json, multiprocessing, os, sys
context = multiprocessing.get_context("forkserver")

def target(end, value):
    print("said", flush=True)
    loaded = "xml.dom.minidom" in sys.modules
    received = end.poll(60) and end.recv()
    end.send([value, os.getppid(), os.getpgid(0), loaded, os.environ.get("OWN"), os.getpid(), received])

if __name__ == "__main__":
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, "value"))
    process.start()
    theirs.close()
    alive = process.is_alive()
    ours.send("end")
    told = [*ours.recv(), process.pid]
    process.join(60)
    hangs = context.Process(target=target, args=(ours, "hangs"))
    hangs.start()
    hangs.terminate()
    hangs.join(60)
    with open(sys.argv[1], "w") as out:
        json.dump([told, os.getpid(), alive, process.exitcode, hangs.exitcode], out)
"""


def test_what_a_fork_starts_is_forked_too_and_belongs_to_its_group(server: ForkServer, tmp_path: Path) -> None:
    """vLLM starts its engine so. What a target gets, says and sends goes its usual way."""
    script, told, said = tmp_path / "script.py", tmp_path / "told.json", tmp_path / "said"
    script.write_text(STARTS)
    with open(said, "w") as stdout:
        command = f"exec {server.executable} {script} {told}"
        subprocess.run(["sh", "-c", command], env={**os.environ, "OWN": "value"}, stdout=stdout, check=True)
    end = time.monotonic() + 60
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    (value, parent, group, loaded, own, pid, received, known), starter, alive, code, killed = json.loads(
        told.read_text()
    )
    assert (value, own, received, loaded, alive) == ("value", "value", "end", True, True)
    assert parent == server._process.pid and group == starter and pid == known
    assert (code, killed) == (255, 255)
    assert not psutil.pid_exists(pid)
    assert "said" in said.read_text()


STAYS = """
import multiprocessing, os, sys, time

def target(end):
    end.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("forkserver").Process(target=target, args=(theirs,)).start()
    with open(sys.argv[1] + ".new", "w") as out:
        out.write(f"{os.getpid()} {ours.recv()}")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_fork_has_started_ends_with_the_server(server: ForkServer, tmp_path: Path) -> None:
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(STAYS)
    subprocess.run(["sh", "-c", f"exec {server.executable} {script} {told}"], check=True)
    end = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    killed, left = map(int, told.read_text().split())
    assert ends(killed, reaped=True) and psutil.pid_exists(left)
    server.close()
    assert ends(left, 0)


def test_it_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    program = """
        import os, sys
        from rl.run.fork_server import ForkServer
        server = ForkServer(sys.argv[1], "json")
        server.wait()
        print(server._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        command = [sys.executable, "-c", textwrap.dedent(program), directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout))


def test_a_module_that_cannot_be_loaded_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        server = ForkServer(directory, "no_such_module")
        with pytest.raises(RuntimeError, match="ended with status 1"):
            server.wait()
    assert "no_such_module" in capfd.readouterr().err
