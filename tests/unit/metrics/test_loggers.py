"""A logger that cannot be started, or that fails later, gets nothing more, and whoever logs goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.metrics import samples
from rl.metrics.loggers import Loggers, Tables, take_over

SAMPLE = dict.fromkeys(samples.COLUMNS, "x")


class Broken:
    """One of verl's logger objects; it fails from its call ``good`` + 1 on."""

    def __init__(self, good: int = 0) -> None:
        self.good, self.calls = good, list[str]()
        self.writer = SimpleNamespace(add_text=lambda *_: self.note("text"))

    def note(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) > self.good:
            raise OSError(28, "No space left on device")

    def log(self, data: Any, step: int) -> None:
        self.note("log")

    def finish(self, **_: Any) -> None:
        self.note("finish")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Broken]:
    """Return what verl's Tracking makes, by name; a name that is missing cannot be started."""
    from verl.utils import tracking

    made: dict[str, Broken] = {}

    class Tracking:
        def __init__(self, project: str, experiment: str, names: list[str], config: Any) -> None:
            (self.name,) = names
            self.logger = {self.name: made[self.name]}
            self.log, self.finish = self.logger[self.name].log, self.logger[self.name].finish

    monkeypatch.setattr(tracking, "Tracking", Tracking)
    return made


def test_one_line_and_the_others_go_on(parts: dict[str, Broken]) -> None:
    parts |= {"console": Broken(good=99), "file": Broken(good=1), "tensorboard": Broken()}
    said = list[str]()
    loggers = Loggers(said.append, "p", "e", ["file", "clearml", "console", "tensorboard"], None)
    assert said == ["clearml failed and gets nothing more; the run goes on (KeyError: 'clearml')"]
    samples.log_samples([SAMPLE], loggers, 1)
    for step in (1, 2, 3):
        loggers.log(data={"a": 1}, step=step)
    loggers.finish(exit_code=0)
    assert [line.partition(" ")[0] for line in said] == ["clearml", "tensorboard", "file"]
    assert said[1].endswith("(OSError: [Errno 28] No space left on device)")
    assert parts["console"].calls == ["log", "log", "log", "finish"]
    assert parts["file"].calls == ["log", "log", "finish"] and parts["tensorboard"].calls == ["text", "finish"]


def test_tables_go_to_loggers_that_work(parts: dict[str, Broken]) -> None:
    parts["console"], told = Broken(good=99), list[Any]()
    loggers = Loggers(print, "p", "e", ["console", "swanlab"], None)
    tables = Tables(SimpleNamespace(log=lambda *given: told.append(given)), loggers)
    tables.log(["swanlab", "console"], {0.5: 2}, 7)
    assert told == [(["console"], {0.5: 2}, 7)]


def test_the_end_of_the_run_is_no_failure_of_a_logger(parts: dict[str, Broken]) -> None:
    loggers = Loggers(print, "p", "e", [], None)
    with pytest.raises(KeyboardInterrupt), loggers.guarded("console"):
        raise KeyboardInterrupt


def test_verl_still_ends_the_run_when_a_logger_fails(parts: dict[str, Broken]) -> None:
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.tracking import Tracking

    parts["console"] = Broken()
    with pytest.raises(OSError, match="No space"):
        Tracking("p", "e", ["console"], None).log(data={}, step=1)
    before = trainer_base.Tracking
    try:
        take_over(trainer_base, print)
        made = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=["console"], config={})
        assert isinstance(made, Loggers)
    finally:
        trainer_base.Tracking = before


PLAY = """
import json, resource, sys
from pathlib import Path
import psutil
from rl.metrics.loggers import Loggers
from rl.metrics.samples import COLUMNS, log_samples
fault, said = sys.argv[1], []
if fault == "full":  # for TensorBoard's events and wandb's tables
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
if fault == "no directory":
    for name in ("wandb", "tensorboard"):
        Path(name).write_text("")
loggers = Loggers(said.append, "p", "e", ["wandb", "tensorboard"], {"trainer": {"a": 1}})
for step in range(1, 5):
    loggers.log(data={"a": step} | {f"b{i}": i for i in range(200)}, step=step)
    log_samples([dict.fromkeys(COLUMNS, "x" * 1000)] * 20, loggers, step)
    if fault == "killed" and step == 1:
        (core,) = [one for one in psutil.Process().children() if "wandb-core" in " ".join(one.cmdline())]
        core.kill()
    if fault == "full" and "tensorboard" in loggers.logger:
        try:
            loggers.logger["tensorboard"].writer.flush()  # else its thread fails some time later
        except OSError:
            pass
loggers.finish()
print(json.dumps(said))
"""


FORKS = """
import json, os, sys
import torch.utils.tensorboard, verl.utils.tracking  # not wandb, which makes a directory that goes with the first fork
codes = []
for directory in sys.argv[2:]:
    if os.fork() == 0:
        os.chdir(directory)
        for number, name in ((1, "said"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        os.environ |= {"WANDB_DIR": directory, "TENSORBOARD_DIR": f"{directory}/tensorboard"}
        play, sys.argv = sys.argv[1], ["", os.path.basename(directory)]
        exec(play)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(codes))
"""
FAULTS = {
    "none": [],
    "killed": ["wandb"],
    "full": ["wandb", "tensorboard"],
    "no directory": ["wandb", "tensorboard"],
}


def test_real_loggers(tmp_path: Path) -> None:
    """wandb's own process is killed, the disk is full, or the directories cannot be made: a line each, exit code 0, and
    no traceback, not even at the end of the process. The processes are forks of one, which imports what takes long."""
    for fault in FAULTS:
        (tmp_path / fault).mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", FORKS, PLAY, *(str(tmp_path / fault) for fault in FAULTS)],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    errors = {fault: (tmp_path / fault / "errors").read_text() for fault in FAULTS}
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, 0, 0], errors
    for fault, failing in FAULTS.items():
        # TensorBoard's own thread says what it died of; in a run, that is in run.log.
        told = errors[fault]
        assert ("Traceback" in told) == (fault == "full") and "Exception ignored" not in told, told
        said = json.loads((tmp_path / fault / "said").read_text().splitlines()[-1])
        assert [line.partition(" ")[0] for line in said] == failing, said
