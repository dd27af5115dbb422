"""This module tests files that are replaced in one step, and what rl.run.programs offers to those who start
programs.
"""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl.run import programs
from rollout import files
from tests.kit import ends


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for synced in (False, True):
        files.write(path, f"{synced}", synced)
        assert path.read_text() == f"{synced}" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_free_ports_are_different_and_no_connection_gets_one() -> None:
    ports = set(programs.free_ports(50))
    assert len(ports) == 50
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        given = connection.getsockname()[1]
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) <= given


@pytest.mark.parametrize(("text", "count", "last"), [("a\n b \n\n", 1, "b"), ("a\nb\n\nc", 2, "b\nc"), ("\n", 3, "")])
def test_last_lines_skip_blank_ones(text: str, count: int, last: str) -> None:
    assert programs.last_lines(text, count) == last


def test_the_end_of_a_log_is_short_and_never_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for content, end in ((b"", "no output"), (b"a\n\xff" + b"x" * 400 + b"\n", "\ufffd" + "x" * 299)):
        log.write_bytes(content)
        assert programs.end_of_log(log) == end


def test_a_tied_program_ends_with_the_one_that_started_it() -> None:
    program = "import time; print('up', flush=True); time.sleep(99)"
    code = f"""
import subprocess, sys, time
from rl.run.programs import tied
child = subprocess.Popen(tied(sys.executable, "-c", {program!r}), stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
time.sleep(99)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline()
    (child,) = psutil.Process(parent.pid).children()
    assert child.cmdline() == [sys.executable, "-c", program]  # the program itself, not what tied it
    parent.kill()
    parent.wait()
    assert ends(child.pid, 30)
