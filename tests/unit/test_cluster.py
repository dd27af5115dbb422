"""What `rl.cluster` does before it starts Ray: places, run directories, sweeps, staging, messages between nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rl.cluster.__main__ import run_directory, sweep_line
from rl.cluster.head import Signals, StartStopped, check_job
from rl.cluster.link import Link, Listener, NodeError, Place
from rl.cluster.member import unless
from rl.cluster.ray import check_gpus
from rl.cluster.stage import copy, stage
from rl.config import ConfigError, compose
from rl.run import stop
from tests.check_kit import composed

TASK = {
    "SLURM_JOB_ID": "10042",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURMD_NODENAME": "n2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "RAY_AUTH_TOKEN": "secret",
}


def place(node: str, nodes: int, port: int, key: str = "secret") -> Place:
    return Place(0 if node == "n1" else 1, nodes, node, "7", 0, None, "127.0.0.1", port, key)


def test_a_task_reads_its_place_from_slurm() -> None:
    found = Place.of(TASK)
    assert (found.rank, found.nodes, found.node, found.job, found.attempt) == (1, 3, "n2", "10042", 0)
    again = Place.of(TASK | {"SLURM_RESTART_COUNT": "2"})
    assert again.attempt == 2 and again.job == found.job and again.port == found.port
    in_array = Place.of(TASK | {"SLURM_ARRAY_JOB_ID": "10041", "SLURM_ARRAY_TASK_ID": "3"})
    assert in_array.job == "10041_3" and in_array.array_task == "3"
    with pytest.raises(ConfigError, match=r"SLURMD_NODENAME is not set.*train\.sbatch"):
        Place.of({name: value for name, value in TASK.items() if name != "SLURMD_NODENAME"})


def test_the_run_directory_is_the_jobs_unless_it_is_given(tmp_path: Path) -> None:
    config = composed("+experiment=quickstart", run__root=str(tmp_path))
    assert run_directory(config, "7_1") == tmp_path / "quickstart" / "slurm-7_1"
    config.run.dir = str(tmp_path / "mine")
    assert run_directory(config, "7_1") == tmp_path / "mine"


def test_a_job_must_have_the_nodes_that_the_config_asks_for() -> None:
    config = composed("+experiment=quickstart", trainer__nnodes=3)
    check_job(config, 3)
    check_job(config, 4)  # the fourth only runs episodes
    with pytest.raises(ConfigError, match=r"asks for 3 nodes \(trainer.nnodes=3\), the job has 2; sbatch --nodes=3"):
        check_job(config, 2)
    with_stage = composed("+experiment=quickstart", cluster__stage_dir="/local")
    with pytest.raises(ConfigError, match=r"cluster\.stage_dir: this experiment makes its data"):
        check_job(with_stage, 1)
    config.trainer.v1.trainer_mode = "separate_async"
    config.actor_rollout_ref.rollout.nnodes = 2
    with pytest.raises(ConfigError, match="asks for 5 nodes"):
        check_job(config, 4)


def test_enough_nodes_must_have_their_gpus() -> None:
    config = composed("+experiment=quickstart", trainer__nnodes=2, trainer__n_gpus_per_node=8)
    check_gpus(config, {"n1": 8, "n2": 8, "cpu1": 0})
    with pytest.raises(NodeError, match=r"^n2: 7 GPUs; trainer\.n_gpus_per_node is 8, on 2 nodes$"):
        check_gpus(config, {"n1": 8, "n2": 7})


def test_a_task_of_a_sweep_gets_its_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text("seed=1 'agent.system_prompt=Fix it.'\n\nseed=2\n")
    assert sweep_line(file, "1") == ["seed=1", "agent.system_prompt=Fix it."]
    assert sweep_line(file, "2") == ["seed=2"]
    with pytest.raises(ConfigError, match=r"has 2 lines and none for array task 3; --array=1-2"):
        sweep_line(file, "3")
    with pytest.raises(ConfigError, match="needs an array job"):
        sweep_line(file, None)
    with pytest.raises(ConfigError, match="no file"):
        sweep_line(tmp_path / "none.txt", "1")


def test_the_example_sweep_composes() -> None:
    file = Path(__file__).parents[2] / "scripts" / "slurm" / "seeds.txt"
    assert [sweep_line(file, str(task)) for task in (1, 2, 3)] == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert compose(["+experiment=quickstart", *sweep_line(file, "2")]).seed == 2


# --- the batch script, up to srun; the rest of it is run by tests/integration/test_slurm.py


def batch(directory: Path, cwd: Path, **environment: str) -> tuple[int, list[str], str]:
    """Return exit code, srun's arguments, and standard error of the batch script."""
    srun = directory / "srun"
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{directory}/arguments\n')
    srun.chmod(0o755)
    (directory / "arguments").write_text("")
    script = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"
    environment |= {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", script, "+experiment=x", "a=b c"], cwd=cwd, env=environment, capture_output=True)
    return done.returncode, (directory / "arguments").read_text().splitlines(), done.stderr.decode()


def test_one_variable_chooses_how_python_is_started(tmp_path: Path) -> None:
    """Only srun's arguments are tested, neither apptainer nor pyxis themselves."""
    clone = tmp_path / "a clone"
    (clone / "rl" / "cluster").mkdir(parents=True)
    (clone / "rl" / "cluster" / "__main__.py").touch()
    end = ["-m", "rl.cluster", "+experiment=x", "a=b c"]
    code, arguments, _ = batch(tmp_path, clone)
    assert code == 0 and arguments[0] == "--nodes=2" and arguments[-5:] == [f"{clone}/.venv/bin/python", *end]
    _, arguments, _ = batch(tmp_path, clone, RL_ENV="apptainer", RL_IMAGE="/i.sif", RL_BIND="/data")
    command = ["apptainer", "exec", "--nv", "--bind", f"{clone},/data", "--pwd", str(clone), "/i.sif", "python3"]
    assert arguments[-13:] == [*command, *end]
    _, arguments, _ = batch(tmp_path, clone, RL_ENV="pyxis", RL_IMAGE="nvcr.io#x")
    assert arguments[-8:-5] == [
        "--container-image=nvcr.io#x",
        f"--container-workdir={clone}",
        f"--container-mounts={clone}:{clone},/tmp:/tmp",
    ]
    assert arguments[-5:] == ["python3", *end]
    assert batch(tmp_path, clone, RL_ENV="apptainer")[2].endswith(
        "RL_IMAGE: is not set: RL_ENV=apptainer needs a .sif file\n"
    )
    assert batch(tmp_path, clone, RL_ENV="conda")[::2] == (
        2,
        "RL_ENV is 'conda'; it must be venv, apptainer or pyxis\n",
    )
    assert batch(tmp_path, tmp_path)[::2] == (2, f"call sbatch in the clone's directory; {tmp_path} is none\n")


# --- files on a disk of the node


def staging(**keys: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "cluster": {"stage_dir": keys["stage_dir"]},
            "actor_rollout_ref": {"model": {"path": keys["model"]}},
            "data": {"train_files": keys["train"], "val_files": keys["val"]},
        }
    )


def test_model_and_task_files_are_copied_once_and_again_when_they_change(tmp_path: Path) -> None:
    model, train, val = tmp_path / "model", tmp_path / "train.parquet", tmp_path / "val.parquet"
    (model / "sub").mkdir(parents=True)
    for file in (model / "config.json", model / "sub" / "w.safetensors", train, val):
        file.write_text(file.name)
    said: list[str] = []
    config = staging(stage_dir=str(tmp_path / "local"), model=str(model), train=[str(train)], val=str(val))
    keys = stage(config, said.append)
    local = Path(keys["actor_rollout_ref.model.path"])
    assert (local / "sub" / "w.safetensors").read_text() == "w.safetensors" and local.parent == tmp_path / "local"
    assert [Path(name).read_text() for name in keys["data.train_files"]] == ["train.parquet"]
    assert [Path(name).suffix for name in keys["data.val_files"]] == [".parquet"]
    assert keys["cluster.staged_from"] == str(model)
    assert len(said) == 3 and json.dumps(keys)

    assert stage(config, said.append) == keys and len(said) == 3, "copied again"
    (model / "config.json").write_text("changed")
    assert (
        Path(stage(config, said.append)["actor_rollout_ref.model.path"]).joinpath("config.json").read_text()
        == "changed"
    )
    assert not [path for path in (tmp_path / "local").iterdir() if path.name.startswith(".")]


def test_a_failed_copy_is_one_line_of_error(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_text("rows")
    config = staging(stage_dir=str(tmp_path / "local"), model="Qwen/Qwen3-8B", train=str(file), val=str(file))
    with pytest.raises(ConfigError, match="Qwen/Qwen3-8B is not a directory; download"):
        stage(config, print)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"cluster\.stage_dir: copying .*train\.parquet to .*taken"):
        copy(file, tmp_path / "taken", print)


# --- messages between nodes


async def test_nodes_call_the_head_and_stop_when_it_hangs_up(unused_tcp_port: int) -> None:
    said: list[str] = []
    head = Listener(place("n1", 3, unused_tcp_port), said.append)
    late = asyncio.ensure_future(Link.open(place("n2", 3, unused_tcp_port), 60))  # before the head listens
    await asyncio.sleep(0.2)
    await head.listen()
    links = [await late, await Link.open(place("n3", 3, unused_tcp_port), 60)]
    await head.complete(60)
    assert sorted(head.peers) == ["n2", "n3"] and head.address == "127.0.0.1" == links[0].address

    await links[0].send(say="images: 3 of 7")
    await links[0].send(ready={"keys": {}, "stamp": "s"})
    assert (await head.peers["n2"].ready)["stamp"] == "s" and said == ["n2: images: 3 of 7"]
    await head.peers["n3"].send(ray="10.0.0.1:6379")
    assert await links[1].receive() == {"ray": "10.0.0.1:6379"}

    closing = asyncio.ensure_future(head.close(60))
    assert [await link.receive() for link in links] == [None, None]
    assert not closing.done(), "the head waits for its nodes to have stopped"
    for link in links:
        await link.close()
    await closing
    assert not head.failed.done()


async def test_a_node_that_has_a_problem_or_dies_is_named(unused_tcp_port: int) -> None:
    for act, words in (
        (lambda link: link.send(problem="no container engine answers"), "n2: no container engine answers"),
        (lambda link: link.close(), "n2: lost: its process has ended"),
    ):
        head = Listener(place("n1", 2, unused_tcp_port), print)
        await head.listen()
        link = await Link.open(place("n2", 2, unused_tcp_port), 60)
        await head.complete(60)
        await act(link)
        with pytest.raises(NodeError, match=words):
            await asyncio.wait_for(head.failed, 60)
        await link.close()
        await head.close(60)


async def test_a_client_without_the_key_is_not_heard(unused_tcp_port: int) -> None:
    head = Listener(place("n1", 2, unused_tcp_port), print)
    await head.listen()
    with pytest.raises(NodeError, match=r"n2: the head \(127.0.0.1:\d+\) does not answer"):
        await Link.open(place("n2", 2, unused_tcp_port, key="guess"), 1)
    with pytest.raises(NodeError, match=r"1 of 2 nodes have not called in 0 s \(here: n1\)"):
        await head.complete(0.1)
    assert head.peers == {} and not head.failed.done()
    await head.close(1)


async def test_a_taken_port_is_one_line_of_error(unused_tcp_port: int) -> None:
    taken = await asyncio.start_server(lambda *_: None, None, unused_tcp_port)
    with pytest.raises(NodeError, match=f"n1: cannot listen on port {unused_tcp_port}"):
        await Listener(place("n1", 2, unused_tcp_port), print).listen()
    taken.close()


async def test_work_is_cancelled_when_its_guard_fails() -> None:
    loop = asyncio.get_running_loop()
    guard = loop.create_future()
    work = asyncio.ensure_future(asyncio.sleep(60))
    loop.call_soon(guard.set_exception, NodeError("n2: gone"))
    with pytest.raises(NodeError, match="n2: gone"):
        await unless([guard], work)
    assert work.cancelling()
    assert await unless([loop.create_future()], asyncio.sleep(0, "done")) == "done"


# --- signals


async def test_signals_end_the_start_and_are_passed_to_the_trainer_once(tmp_path: Path) -> None:
    signals = Signals()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(StartStopped, match="SIGUSR1"):
        await asyncio.wait_for(signals.early, 60)

    signals = Signals()
    script = "trap 'echo U' USR1; trap 'echo T; exit 75' TERM; echo up; while :; do sleep 0.05; done"
    process = await asyncio.create_subprocess_exec("bash", "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None and await process.stdout.readline() == b"up\n"
    signals.hand_to(process)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert await process.stdout.readline() == b"U\n"
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.3)  # for a second one, which must not come
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.stdout.read() == b"T\n"
    assert signals.exit_code(await process.wait()) == stop.STOPPED
    loop = asyncio.get_running_loop()
    for number in stop.SIGNALS:
        loop.remove_signal_handler(number)


async def test_the_jobs_exit_code_follows_from_the_trainers() -> None:
    signals = Signals()
    assert [signals.exit_code(code) for code in (0, 1, 2, 75, 143)] == [0, 1, 2, 75, 143]
    assert signals.exit_code(-9) == 137, "somebody else killed it"
    signals.seen = [signal.SIGUSR1]
    assert signals.exit_code(-signal.SIGUSR1) == 75, "not yet so far that it could handle the signal"
    signals.seen = [signal.SIGUSR1, signal.SIGTERM]
    assert signals.exit_code(-signal.SIGTERM) == 143
    for number in stop.SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
