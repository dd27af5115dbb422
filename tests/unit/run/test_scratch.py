"""This module tests the temporary files of a run's processes (rl.run.scratch)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import ConfigError
from rl.run.scratch import local_directory, ray_directory

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, subprocess, sys, tempfile
from pathlib import Path
from rl.run.scratch import remove_socket_directory, socket_directory
from rollout.sandbox import directory

note, outside = Path(sys.argv[1]), Path(os.environ.get("RL_BOX_DIR") or os.environ["TMPDIR"])
sockets = Path(socket_directory(note))
assert sockets == Path(note.read_text()) and sockets.is_dir()
assert sockets.stat().st_mode & 0o077 == 0
assert os.environ["RL_SOCKET_DIR"] == os.environ["VLLM_RPC_BASE_PATH"] == str(sockets)
here, child = (Path(tempfile.mkdtemp()), Path(subprocess.check_output(["mktemp", "-d"], text=True).strip()))
assert here.parent == child.parent and here.parent.parent == outside and here.parent != sockets
assert directory._workspace(os.getpid()).parent == outside
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-c", os.environ["PROGRAM"], f"{note}-of-rl.train", "inner"], check=True)
    assert here.exists()
    remove_socket_directory(note)
    assert Path(tempfile.mkdtemp()).parent == outside and not sockets.exists() and not here.exists()
    assert not {"RL_SOCKET_DIR", "VLLM_RPC_BASE_PATH"} & {*os.environ}  # a vLLM server that is started next has its own
else:  # killed; the next one with its note removes what it has left
    os._exit(0)
"""


def test_temporary_files_are_removed_with_the_run_and_boxes_are_beside_them(tmp_path: Path) -> None:
    outside = tmp_path / "tmp"
    outside.mkdir()
    environment = {**os.environ, "TMPDIR": str(outside), "PROGRAM": PROGRAM, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("RL_BOX_DIR", None)
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "note")], env=environment, check=True)
    left = [path for path in outside.iterdir() if path.name.startswith("rl-tmp-")]
    assert [str(path) for path in left] == [(tmp_path / "note-of-rl.train_tmp").read_text()]
    end = (
        "import sys; from pathlib import Path; from rl.run.scratch import *; remove_socket_directory(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", end, str(tmp_path / "note-of-rl.train")], env=environment, check=True)
    assert not left[0].exists() and not list(tmp_path.glob("note*"))


LOCAL = """
import sys, tempfile
from pathlib import Path
from rl.run.scratch import socket_directory
from rollout.sandbox import directory

note, local = Path(sys.argv[1]), Path(sys.argv[2])
made = Path(socket_directory(note, str(local)))
assert made.parent == Path(tempfile.gettempdir()).parent == directory._parent() == local
"""


def test_everything_that_is_made_on_a_node_can_be_elsewhere(tmp_path: Path) -> None:
    local = Path("/tmp", f"rl-test-{os.getpid()}")
    try:
        subprocess.run([sys.executable, "-c", LOCAL, str(tmp_path / "note"), str(local)], check=True, cwd=REPOSITORY)
        assert len(list(local.iterdir())) == 2
    finally:
        subprocess.run(["rm", "-rf", local], check=True)
    taken = Path("/tmp", f"rl-taken-{os.getpid()}")
    taken.touch()
    try:
        with pytest.raises(ConfigError, match=r"cluster\.local_dir: cannot write in /tmp/rl-taken"):
            local_directory(str(taken))
    finally:
        taken.unlink()


def test_sockets_below_the_longest_local_dir_can_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"too long for the sockets.*at most 26$"):
        local_directory("/" + 26 * "x")
    longest = ray_directory("/" + 25 * "x" + "/rl-12345678")
    session = "session_2026-11-23_01-50-46_123456_1234567"
    assert len(f"{longest}/{session}/sockets/plasma_store") <= 107
