"""This program shows what the start of a run costs, process by process, in CPU seconds: ``python -m tests.start_cost``.

It trains the smallest quickstart for one step, with a policy and tasks that are there (--root DIR keeps them for the
next time), and prints a table when the step has ended. More arguments are rl.train's. It needs root: what has ended is
in a cgroup's counter only.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.cpu_seconds import Group
from tests.integration.process_kit import command_line
from tests.integration.train_kit import TINY, WarmStart, start

_LOOK_S = 0.2


def watch(group: Group, seen: dict[psutil.Process, tuple[float, str]], ended: threading.Event) -> None:
    """Note the CPU seconds and the command line of every process of the group, until ``ended``."""
    while not ended.wait(_LOOK_S):
        for pid in (group.place / "cgroup.procs").read_text().split():
            try:
                process = psutil.Process(int(pid))
                times = process.cpu_times()
            except psutil.Error:
                continue
            seen[process] = (times.user + times.system, command_line(process))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir(), "start-cost"))
    args, more = parser.parse_known_args()
    warm = WarmStart.make(args.root)
    own = [argument for argument in TINY if not argument.startswith(("quickstart.", "trainer.", "episode."))]
    own += ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    own += ["trainer.save_freq=-1", "trainer.logger=[]", *warm.given(), *more]
    seen: dict[psutil.Process, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory(prefix="run-") as directory:
        group, ended, began = Group(), threading.Event(), time.monotonic()
        before = group.seconds()
        process = start("+experiment=quickstart", *own, f"run.dir={directory}/run")
        watching = threading.Thread(target=watch, args=(group, seen, ended))
        watching.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                print(f"{time.monotonic() - began:6.1f} s {group.seconds() - before:6.1f} CPU s  {line.rstrip()[:80]}")
            if " step 1/1  resolved" in line:
                ended.set()
        watching.join()
        process.wait()
        group.leave()
    for spent, command in sorted(seen.values(), reverse=True)[:20]:
        print(f"{spent:22.1f} CPU s  {command[:90]}")
    print(f"{sum(spent for spent, _ in seen.values()):22.1f} CPU s  in {len(seen)} processes, to the end of the step")


if __name__ == "__main__":
    main()
