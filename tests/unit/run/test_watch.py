"""The end of a trainer is reported, and dead inference servers are found. What needs Ray is in integration."""

import http.server
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl.run import watch

# A run that ends as its argument says, beside a witness.
RUN = """
import os, pathlib, subprocess, sys, time
from rl.run.watch import Witness
from rollout.sandbox import directory
scratch, out = pathlib.Path(sys.argv[1]), os.dup(1)
step = 0
line = lambda cause: f"{cause or 'killed'} after step {(scratch.parent / 'step').read_text()}"
witness = Witness(line, out, [scratch])
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
(scratch.parent / "step").write_text("3")
(scratch / "socket").touch()
boxes = directory._workspace(os.getpid())
(scratch.parent / "boxes").write_text(str(boxes))
os.write(out, b"started\\n")
if sys.argv[2] != "stay":
    witness.tell("Ray died")
if sys.argv[2] == "end":
    witness.dismiss()
elif sys.argv[2] == "stay":
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_run_is_reported_and_its_scratch_and_boxes_are_removed(tmp_path: Path, number: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen([sys.executable, "-c", RUN, scratch, "stay"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(number)
    assert process.communicate(timeout=120)[0] == "killed after step 3\n"  # and the witness has ended: its stdout has
    assert process.returncode == -number and not scratch.exists()
    assert not Path((tmp_path / "boxes").read_text()).exists()


def test_scratch_is_removed_even_if_nobody_reads_the_screen(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen([sys.executable, "-c", RUN, scratch, "stay"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.stdout.close()
        process.kill()
    end = time.monotonic() + 120
    while scratch.exists():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_run_that_ends_itself_is_reported_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path / "scratch", "tell"], capture_output=True, timeout=120)
    assert done.stdout == b"started\nRay died after step 3\n" and not (tmp_path / "scratch").exists()


def test_a_run_that_ends_in_order_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path / "scratch", "end"], capture_output=True, timeout=120)
    assert done.stdout == b"started\n" and done.returncode == 0 and (tmp_path / "scratch").exists()


@contextmanager
def server(status: int, after_s: float = 0) -> Generator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(after_s)
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_dead_engines_are_found_and_busy_ones_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(200) as lives, server(503) as dead, server(200, after_s=1) as busy:
        assert watch.dead_engine([lives, dead]).startswith(f"the inference server at {dead} died")
        monkeypatch.setattr(watch, "ANSWER_S", 0.2)
        assert watch.dead_engine([lives, busy]) == ""
    assert watch.dead_engine([lives]).startswith(f"the inference server at {lives} died")  # nobody listens any more


def test_a_death_interrupts_whatever_the_trainer_waits_for() -> None:
    """The run is a process of its own, because the watchdog ends the process a minute later."""
    script = """
import time
from rl.run import watch
watch.PERIOD_S = 0.05
watch.dead_actor = lambda: "a worker died"
try:
    with watch.Watchdog(lambda cause: print("last words:", cause, flush=True)):
        time.sleep(600)
except watch.PartDied as died:
    print("ended:", died)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "last words: a worker died\nended: a worker died\n" and done.returncode == 0


def test_an_error_that_a_death_caused_is_reported_as_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "dead_actor", lambda: "a worker died")
    with pytest.raises(watch.PartDied, match="a worker died"), watch.Watchdog(lambda cause: None):
        raise OSError("pages of it")
    monkeypatch.setattr(watch, "dead_actor", lambda: "")
    with pytest.raises(OSError, match="pages of it"), watch.Watchdog(lambda cause: None):
        raise OSError("pages of it")


def test_a_silent_server_is_reported_as_its_actors_death_if_ray_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["", "the server's actor died: its process ended", "", "", ""])
    monkeypatch.setattr(watch, "RAY_S", 0)
    monkeypatch.setattr(watch, "dead_actor", lambda: next(said))
    monkeypatch.setattr(watch, "dead_engine", lambda addresses: "a server died" if addresses else "")
    looking = watch.Watchdog(lambda cause: None)
    looking.engines = ["127.0.0.1:1"]
    assert looking.look() == "the server's actor died: its process ended"
    assert looking.look() == "a server died"
    looking.engines = []
    assert looking.look() == ""


def test_a_trainer_that_cannot_be_interrupted_still_ends() -> None:
    script = """
import time
from rl.run import watch
watch.PERIOD_S = watch.END_S = 0.2
watch.dead_actor = lambda: 1 / 0
try:
    with watch.Watchdog(lambda cause: print("last words:", cause, flush=True)):
        time.sleep(600)
finally:
    time.sleep(600)  # Ray's end, say
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "last words: Ray's head does not answer: division by zero\n" and done.returncode == 1
