"""Signals end a run, which is a process of its own here because signal handlers belong to the process."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.run import stop

ROOT = Path(__file__).parents[3]

# A trainer whose steps end when they are asked to; it reports what rl.train.trainer and rl.train make of the signals.
RUN = """
import sys, time
from rl.run import stop
end = time.time() + float(sys.argv[3]) if sys.argv[3:] else None
stop.install(float(sys.argv[1]), lambda line: print("said", line, flush=True), lambda: end)
try:
    print("started", flush=True)
    if sys.argv[2] == "starting":
        time.sleep(600)
    stop.enter_steps()
    while not stop.asked():
        print("in a step", flush=True)
        time.sleep(0.3 if sys.argv[2] == "steps" else 600)
    stop.end(stop.RunStopped(stop.asked()))
except KeyboardInterrupt:
    end = stop.reason()
    stopped = isinstance(end, stop.RunStopped)
    print("stopped by" if stopped else "cut short:", end, flush=True)
    sys.exit(stop.STOPPED if stopped else stop.CUT_SHORT)
"""


def run(grace_s: float, phase: str, until: str, *signals: int, left_s: float | None = None) -> tuple[str, int]:
    arguments = [str(grace_s), phase, *([] if left_s is None else [str(left_s)])]
    process = subprocess.Popen([sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    with process:
        try:
            while until not in process.stdout.readline():
                assert process.poll() is None
            for number in signals:
                process.send_signal(number)
                if number is not signals[-1]:
                    assert "SIGUSR1: ending" in process.stdout.readline()
            return process.communicate(timeout=120)[0], process.returncode
        finally:
            process.kill()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_ends_the_run_after_the_step(number):
    said, code = run(60, "steps", "in a step", number)
    assert f"said {number.name}: ending, in 60 s at the latest" in said
    assert f"stopped by {number.name}" in said and code == 75


def test_before_the_first_step_a_signal_ends_at_once():
    said, code = run(60, "starting", "started", signal.SIGTERM)
    assert said == "stopped by SIGTERM\n" and code == 75


def test_a_second_warning_loses_nothing():
    """The scheduler and a program of the job may both warn."""
    said, code = run(60, "steps", "in a step", signal.SIGUSR1, signal.SIGUSR1)
    assert "stopped by SIGUSR1" in said and code == 75


def test_sigterm_as_a_second_signal_ends_at_once():
    said, code = run(60, "hung", "in a step", signal.SIGUSR1, signal.SIGTERM)
    assert "cut short: a second signal (SIGTERM)" in said and code == 143


def test_a_step_that_takes_longer_than_its_grace_is_cut_short():
    said, code = run(0.3, "hung", "in a step", signal.SIGTERM)
    assert "cut short: run.grace_s" in said and code == 143


def test_the_jobs_end_limits_the_grace_and_the_line_says_so():
    said, code = run(600, "hung", "in a step", signal.SIGUSR1, left_s=1.0)
    assert re.search(r"ending, in 1 s at the latest \(the job ends at [\d:]{8}, before run.grace_s = 600 s\)", said)
    assert "cut short: run.grace_s = 600 s, of which the job's end left 1, were not enough" in said and code == 143


@pytest.mark.parametrize("left_s", [-5.0, 3600.0])
def test_a_job_that_ends_later_or_an_old_figure_changes_nothing(left_s: float):
    said, code = run(60, "steps", "in a step", signal.SIGUSR1, left_s=left_s)
    assert "ending, in 60 s at the latest; then SIGTERM ends at once" in said and code == 75


@pytest.mark.parametrize("number, after", [(10, 0.0), (15, 0.05), (10, 0.3), (15, 1.0), (10, 2.0), (15, "new run in")])
def test_a_signal_at_any_instant_of_a_start_ends_it_with_75_and_one_line(
    number: int, after: float | str, tmp_path: Path
) -> None:
    """The parent blocks the signals, so that none is lost before Python runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rl.train", "+experiment=quickstart", f"run.root={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS),
    )
    assert process.stdout is not None
    with process:
        try:
            if isinstance(after, str):
                while after not in (line := process.stdout.readline()):
                    assert line
            else:
                time.sleep(after)
            process.send_signal(number)
            said = process.communicate(timeout=300)[0]
        finally:
            process.kill()
    (line,) = [line for line in said.splitlines() if "stopped by" in line]
    assert signal.Signals(number).name in line and "the same command continues" in line
    assert "Traceback" not in said and "killed" not in said and process.returncode == 75


def test_a_signal_that_another_thread_takes_waits_too():
    """The mask of hold() is one thread's; a trainer has others when its witness starts."""
    code = """
import os, signal, threading, time
from rl.run import stop
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
stop.early()
stop.hold()
os.kill(os.getpid(), signal.SIGTERM)  # the kernel picks the thread that does not block it
while not stop._waiting:
    time.sleep(0.01)
print("held", flush=True)
try:
    stop.install(60, print, float)
    stop.release()
except KeyboardInterrupt:
    print("stopped by", stop.reason(), flush=True)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert process.stdout == "held\nstopped by SIGTERM\n"


def test_a_signal_after_the_run_has_ended_orderly_changes_nothing():
    code = """
import os, signal, sys
from rl.run import stop
stop.install(60, print, float)
try:
    stop.enter_steps()
    os.kill(os.getpid(), signal.SIGUSR1)
    stop.end(stop.RunStopped(stop.asked()))
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    assert isinstance(stop.reason(), stop.RunStopped) and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    sys.exit(stop.STOPPED)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 75
