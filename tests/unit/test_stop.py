"""Signals end a run, which is a process of its own here because signal handlers belong to the process."""

import signal
import subprocess
import sys

import pytest

from rl.run import stop

# A trainer whose steps end when they are asked to; it reports what rl.trainer and rl.train make of the signals.
RUN = """
import sys, time
from rl.run import stop
stop.install(float(sys.argv[1]), lambda line: print("said", line, flush=True))
try:
    print("started", flush=True)
    if sys.argv[2] == "starting":
        time.sleep(600)
    stop.enter_steps()
    while not stop.asked():
        print("in a step", flush=True)
        time.sleep(0.3 if sys.argv[2] == "steps" else 600)
    stop.end(stop.Stopped(stop.asked()))
except KeyboardInterrupt:
    end = stop.reason()
    stopped = isinstance(end, stop.Stopped)
    print("stopped by" if stopped else "cut short:", end, flush=True)
    sys.exit(stop.STOPPED if stopped else stop.CUT_SHORT)
"""


def run(grace_s: float, phase: str, until: str, *signals: int) -> tuple[str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(grace_s), phase], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    with process:
        try:
            while until not in process.stdout.readline():
                assert process.poll() is None
            for number in signals:
                process.send_signal(number)
                if number is not signals[-1]:
                    assert "ending after this step" in process.stdout.readline()
            return process.communicate(timeout=120)[0], process.returncode
        finally:
            process.kill()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_ends_the_run_after_the_step(number):
    said, code = run(60, "steps", "in a step", number)
    assert f"said {number.name}: ending after this step, in 60 s at the latest" in said
    assert f"stopped by {number.name}" in said and code == 75


def test_before_the_first_step_a_signal_ends_at_once():
    said, code = run(60, "starting", "started", signal.SIGTERM)
    assert said == "stopped by SIGTERM\n" and code == 75


def test_a_second_signal_ends_at_once():
    said, code = run(60, "hung", "in a step", signal.SIGUSR1, signal.SIGTERM)
    assert "cut short: a second signal (SIGTERM)" in said and code == 143


def test_a_step_that_takes_longer_than_its_grace_is_cut_short():
    said, code = run(0.3, "hung", "in a step", signal.SIGTERM)
    assert "cut short: run.grace_s" in said and code == 143
