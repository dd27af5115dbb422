"""The batch scripts run without SLURM: srun and scontrol are ours. The real ones are in
tests/integration/cluster/.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = "scripts/slurm"
TRAIN = ("train.sbatch", "+experiment=x", "a=b c")


class Batch:
    """The batch scripts in a clone of their own, and what stands for SLURM's programs."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clone = directory, directory / "a clone"
        for file in ("rl/cluster/__main__.py", ".venv/bin/python"):
            (self.clone / file).parent.mkdir(parents=True)
            (self.clone / file).touch(0o755)
        (self.clone / SCRIPTS).mkdir(parents=True)
        shutil.copy(ROOT / SCRIPTS / "common.sh", self.clone / SCRIPTS)
        self.program("srun", f'printf "%s\\n" "$@" >{directory}/arguments')
        self.program("scontrol", "exit 1")

    def program(self, name: str, code: str) -> None:
        """Make a program that the script finds; $BATCH is the script's process in its shell code."""
        file = self.directory / name
        file.write_text(f"#!/bin/bash\n{code}\n")
        file.chmod(0o755)

    def run(self, *script: str, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
        """Return exit code and standard error, without the seconds until a warning.

        The script is train.sbatch if none is given with its arguments.
        """
        environment |= {"PATH": f"{self.directory}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
        environment |= {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_SUBMIT_DIR": str(cwd or self.clone)}
        notes = self.directory / "notes"
        notes.mkdir(exist_ok=True)
        environment = {"TMPDIR": str(notes), **environment}
        name, *arguments = script or TRAIN
        command = ["bash", "-c", 'BATCH=$$ exec bash "$@"', "bash", ROOT / SCRIPTS / name, *arguments]
        done = subprocess.run(command, cwd=cwd or self.clone, env=environment, capture_output=True, timeout=50)
        assert not [*notes.iterdir()]
        return done.returncode, re.sub(r"(?<=was warned after )\d+(?= s)", "N", done.stderr.decode())

    def arguments(self) -> list[str]:
        return (self.directory / "arguments").read_text().splitlines()


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_one_variable_chooses_how_python_is_started(batch: Batch, tmp_path: Path) -> None:
    """Only srun's arguments are tested, neither apptainer nor pyxis themselves."""
    end = ["-m", "rl.cluster", "+experiment=x", "a=b c"]
    assert batch.run() == (0, "")
    assert batch.arguments()[:2] == ["--export=ALL", "--nodes=2"]
    assert batch.arguments()[-5:] == [f"{batch.clone}/.venv/bin/python", *end]
    image = tmp_path / "i.sif"
    image.touch()
    assert batch.run(RL_ENV="apptainer", RL_IMAGE=str(image), RL_BIND="/data")[0] == 0
    command = ["apptainer", "exec", "--nv", "--bind", f"{batch.clone},/data", "--pwd", str(batch.clone), str(image)]
    assert batch.arguments()[-13:] == [*command, "python3", *end]
    batch.program("srun", f'[ "$1" = --help ] && echo --container-image || printf "%s\\n" "$@" >{tmp_path}/arguments')
    assert batch.run(RL_ENV="pyxis", RL_IMAGE="nvcr.io#x")[0] == 0
    at = batch.arguments().index("--container-image=nvcr.io#x")
    assert batch.arguments()[at + 1 : at + 4] == [
        f"--container-workdir={batch.clone}",
        f"--container-mounts={batch.clone}:{batch.clone},/tmp:/tmp",
        "bash",
    ]
    assert batch.arguments()[-5:] == ["python3", *end]


ALL = [TRAIN, ("array.sbatch", "rl.data.admit", "T"), ("images.sbatch", "T")]
ARRAY = {f"SLURM_ARRAY_TASK_{name}": value for name, value in {"ID": "2", "MIN": "1", "MAX": "4", "COUNT": "4"}.items()}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RL_SITE": "/no/file"}, "RL_SITE: no file /no/file"),
        ({"RL_ENV": "apptainer"}, "RL_ENV=apptainer: no file RL_IMAGE=; give a .sif file"),
        (
            {"RL_ENV": "apptainer", "RL_IMAGE": "/no.sif"},
            "RL_ENV=apptainer: no file RL_IMAGE=/no.sif; give a .sif file",
        ),
        ({"RL_ENV": "packed"}, "RL_ENV=packed: no file RL_IMAGE=; scripts/slurm/packed_env.sh makes one"),
        ({"RL_ENV": "pyxis"}, "RL_ENV=pyxis: RL_IMAGE is not set; give an image"),
        ({"RL_ENV": "pyxis", "RL_IMAGE": "x"}, "RL_ENV=pyxis, but srun here has no pyxis plugin"),
        ({"RL_ENV": "conda"}, "RL_ENV is 'conda'; it must be venv, packed, apptainer or pyxis"),
    ],
)
@pytest.mark.parametrize("script", ALL)
def test_what_the_first_node_lacks_is_one_line(
    batch: Batch, script: list[str], environment: dict[str, str], said: str
) -> None:
    assert batch.run(*script, **environment, **ARRAY) == (2, f"{script[0]}: {said}\n")


@pytest.mark.parametrize("script", ALL)
def test_the_script_wants_the_clones_directory(batch: Batch, script: list[str], tmp_path: Path) -> None:
    said = f"{script[0]}: call sbatch in the clone's directory; {tmp_path} is none\n"
    assert batch.run(*script, cwd=tmp_path, **ARRAY) == (2, said)


@pytest.mark.parametrize("script", ALL[1:])
def test_a_job_of_one_node_starts_python_as_the_others_do(batch: Batch, script: list[str], tmp_path: Path) -> None:
    """Also after sbatch --export=NONE, and with a site's file that uses a variable which is not set."""
    (batch.clone / SCRIPTS / "site.sh").write_text("export MODULES=$NOT_SET.cuda\n")
    batch.program("srun", f'printf "%s\\n" "$@" "$MODULES" >{tmp_path}/arguments')
    end = {
        "array.sbatch": ["rl.data.admit", "T", "--shard", "2/4"],
        "images.sbatch": ["rl.boxes", "T", "--shard", "2/4"],
    }
    last = ["-m", *end[script[0]], ".cuda"]
    assert batch.run(*script, **ARRAY, SLURM_CPUS_PER_TASK="4") == (0, "")
    how = ["--export=ALL", "--nodes=1", "--ntasks=1", "--cpus-per-task=4", "--cpu-bind=none"]
    assert batch.arguments() == [*how, f"{batch.clone}/.venv/bin/python", *last]
    packed = tmp_path / "e.tar.zst"
    packed.touch()
    (batch.clone / SCRIPTS / "packed_env.sh").touch(0o755)
    assert batch.run(*script, **ARRAY, RL_ENV="packed", RL_IMAGE=str(packed)) == (0, "")
    assert batch.arguments()[4:] == ["scripts/slurm/packed_env.sh", "run", str(packed), *last]
    (batch.clone / ".venv" / "bin" / "python").unlink()
    needs = "run scripts/setup.sh, on a disk that all nodes share"
    said = f"{script[0]}: node n1: no {batch.clone}/.venv/bin/python; {needs}\n"
    assert batch.run(*script, **ARRAY) == (69, said)


def test_an_array_job_must_be_one_and_know_its_shards(batch: Batch) -> None:
    assert batch.run("array.sbatch", "rl.train", **ARRAY)[1] == (
        "array.sbatch: give rl.data.admit, rl.data.probe, rl.evaluate or rollout.collect and its arguments, not "
        "'rl.train'\n"
    )
    assert batch.run("array.sbatch", "rl.evaluate") == (
        2,
        "array.sbatch: this needs an array job: sbatch --array=1-N ...\n",
    )
    part = {**ARRAY, "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
    assert "--array is not 1-3; give 1-N, or set RL_SHARDS" in batch.run("array.sbatch", "rl.evaluate", **part)[1]
    assert batch.run("array.sbatch", "rl.evaluate", **part, RL_SHARDS="4") == (0, "")
    assert batch.arguments()[-3:] == ["-m", "rl.evaluate", "shard=2/4"]


def test_the_scripts_notes_are_where_temporary_files_are(batch: Batch, tmp_path: Path) -> None:
    batch.program("srun", f"echo $RL_WARNING >{tmp_path}/warning")
    (tmp_path / "tmp").mkdir()
    for directory, place in ((tmp_path / "tmp", tmp_path / "tmp"), (tmp_path / "none", Path("/tmp"))):
        assert batch.run(TMPDIR=str(directory)) == (0, "")
        assert Path((tmp_path / "warning").read_text()).parent.parent == place
    assert not list((tmp_path / "tmp").iterdir())


RUN_TASK = 'while [ "$1" != bash ]; do shift; done; exec "$@"'  # what srun does on a node


def test_what_a_node_lacks_is_one_line_with_its_name(batch: Batch, tmp_path: Path) -> None:
    batch.program("srun", RUN_TASK)
    assert batch.run() == (0, "")
    batch.program("srun", f"cd /; {RUN_TASK}")  # as slurmd does without the directory
    no_clone = f"cluster: node n1: no {batch.clone}; the clone must be on a disk that all nodes share\n"
    assert batch.run() == (69, no_clone)
    batch.program("srun", RUN_TASK)
    (batch.clone / ".venv" / "bin" / "python").unlink()
    needs = "run scripts/setup.sh, on a disk that all nodes share"
    assert batch.run() == (69, f"cluster: node n1: no {batch.clone}/.venv/bin/python; {needs}\n")
    image = tmp_path / "i.sif"
    image.touch()
    needs = "RL_ENV=apptainer needs apptainer: load its module before sbatch"
    assert batch.run(RL_ENV="apptainer", RL_IMAGE=str(image)) == (69, f"cluster: node n1: no apptainer; {needs}\n")


def test_a_task_that_is_ended_before_python_hides_no_other_tasks_code(batch: Batch, tmp_path: Path) -> None:
    """SLURM ends the tasks of all nodes when one is lost; scancel ends them, too, and the script as well."""
    batch.program("srun", RUN_TASK)
    batch.program("env", "kill -TERM $PPID")  # while the task waits for it
    assert batch.run(SLURM_PROCID="1") == batch.run(SLURM_PROCID="0") == (0, "")
    batch.program("env", "kill -TERM $PPID $BATCH")
    assert batch.run(SLURM_PROCID="0") == (75, "")


def test_a_signal_before_srun_ends_the_job_at_once(batch: Batch, tmp_path: Path) -> None:
    show = '[ "$1" = --oneliner ] && kill -{} $BATCH'  # while the script waits for it: before srun
    requeued = tmp_path / "requeued"
    requeue = f"{{ [ $1 = requeue ] && echo $2 >{requeued} && kill -TERM $BATCH; }}"  # SLURM ends the script
    batch.program("srun", f"touch {tmp_path}/started")
    batch.program("scontrol", f"{show.format('USR1')} || {requeue}")
    code, said = batch.run()
    assert code == -signal.SIGTERM and requeued.read_text() == "1\n" and "start 1 was warned after N s" in said
    requeued.unlink()
    batch.program("scontrol", f"{show.format('TERM')} || {requeue}")
    assert batch.run() == (75, "") and not requeued.exists()
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("code", "again"), [(75, True), (143, True), (138, True), (0, False), (1, False), (69, False)])
def test_a_warning_reaches_the_job_as_a_file_and_it_is_requeued(
    batch: Batch, tmp_path: Path, code: int, again: bool
) -> None:
    requeued = tmp_path / "requeued"
    batch.program("scontrol", f"[ $1 = requeue ] && echo $2 >{requeued} && kill -TERM $BATCH")
    batch.program("srun", f"kill -USR1 $BATCH; until [ -e $RL_WARNING ]; do :; done; exit {code}")
    early = "train.sbatch: start 1 was warned after N s; is --signal longer than --time?\n" if again else ""
    assert batch.run() == (-signal.SIGTERM if again else code, early) and requeued.exists() == again
    batch.program("srun", f"kill -TERM $BATCH; exit {code}")  # scancel --signal=TERM: no requeue
    requeued.unlink(missing_ok=True)
    assert batch.run() == (75 if code == 138 else code, "") and not requeued.exists()


def test_a_requeue_that_is_refused_or_would_repeat_itself_is_said(batch: Batch) -> None:
    batch.program("srun", "kill -USR1 $BATCH; exit 75")
    batch.program("scontrol", "[ $1 = --oneliner ] && echo 'JobId=1 Requeue=0 Restarts=0' && exit; echo no >&2; exit 1")
    code, said = batch.run()
    assert code == 75 and said.splitlines() == [
        "train.sbatch: SLURM will not requeue this job (Requeue=0); sbatch --requeue, if the site lets you",
        "train.sbatch: start 1 was warned after N s; is --signal longer than --time?",
        "no",
        "train.sbatch: SLURM has not requeued job 1; to continue: the same command with run.dir=<the run's directory>",
    ]
    batch.program("scontrol", "[ $1 = --oneliner ] && exit; kill -TERM $BATCH")
    assert batch.run(SLURM_RESTART_COUNT="0")[0] == -signal.SIGTERM
    code, said = batch.run(SLURM_RESTART_COUNT="1")
    assert code == 75 and "not requeued: start 2 was warned after N s; is --signal longer than --time?" in said


def test_the_job_knows_its_end_whatever_slurm_sets(batch: Batch, tmp_path: Path) -> None:
    batch.program("srun", f"echo $SLURM_JOB_END_TIME >{tmp_path}/end")
    batch.program("scontrol", "echo 'JobId=1 StartTime=2026-01-01T00:00:00 EndTime=2026-01-02T00:00:00 Deadline=N/A'")
    batch.run(TZ="UTC")
    assert (tmp_path / "end").read_text() == "1767312000\n"
    batch.run(SLURM_JOB_END_TIME="5")
    assert (tmp_path / "end").read_text() == "5\n"
    batch.program("scontrol", "echo 'JobId=1 EndTime=Unknown'")
    batch.run()
    assert (tmp_path / "end").read_text() == "\n"
