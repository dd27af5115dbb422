"""`rl.cluster` prepares a job before Ray starts: places, run directories, sweeps, staging, messages between nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rl.cluster.head import Signals, StartStopped, check_job, head
from rl.cluster.link import JobPosition, Link, Listener, NodeError
from rl.cluster.member import check_node, judge, prepare_node, unless
from rl.cluster.stage import copy, stage
from rl.cluster.task import run_directory, sweep_line
from rl.config.compose import ConfigError, compose
from rl.run import stop
from rl.train import starts
from tests.check_kit import composed

ROOT = Path(__file__).parents[3]
TASK = {
    "SLURM_JOB_ID": "10042",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURMD_NODENAME": "n2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "RAY_AUTH_TOKEN": "secret",
}


def place(node: str, nodes: int, port: int, key: str = "secret") -> JobPosition:
    return JobPosition(0 if node == "n1" else 1, nodes, [nodes], node, "7", 0, None, "127.0.0.1", [port], key)


def test_a_task_reads_its_place_from_slurm() -> None:
    found = JobPosition.of(TASK)
    assert (found.rank, found.nodes, found.node, found.job, found.attempt) == (1, 3, "n2", "10042", 0)
    again = JobPosition.of(TASK | {"SLURM_RESTART_COUNT": "2"})
    assert again.attempt == 2 and again.job == found.job
    assert len(found.ports) == 8 and not set(again.ports) & set(found.ports), "a taken port is not met again"
    assert all(20000 <= port < 32000 for port in (*found.ports, *again.ports))
    in_array = JobPosition.of(TASK | {"SLURM_ARRAY_JOB_ID": "10041", "SLURM_ARRAY_TASK_ID": "3"})
    assert in_array.job == "10041_3" and in_array.array_task == "3"
    assert found.role is None and found.plays
    beside = JobPosition.of(TASK | {f"SLURM_JOB_NUM_NODES_HET_GROUP_{part}": "1" for part in range(3)})
    assert [replace(beside, rank=rank).role for rank in range(3)] == ["training", "episodes", "grading"]
    assert [replace(beside, rank=rank).plays for rank in range(3)] == [False, True, True]
    assert beside.resources == ["cluster.episode_resource=episodes", "cluster.grading_resource=grading"]
    two = replace(beside, parts=beside.parts[:2])
    assert [replace(two, rank=rank).role for rank in range(2)] == ["training", "episodes"]
    assert two.resources == ["cluster.episode_resource=episodes"] and found.resources == []
    with pytest.raises(ConfigError, match=r"SLURMD_NODENAME is not set.*train\.sbatch"):
        JobPosition.of({name: value for name, value in TASK.items() if name != "SLURMD_NODENAME"})


def test_a_node_that_plays_no_episodes_needs_neither_the_agent_nor_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    config = composed("+experiment=quickstart", run__root=str(tmp_path), sandbox__isolation="bwrap")
    config.agent.binary = "/no/claude"
    assert check_node(config, plays=False) == ""
    assert "/no/claude" in (wrong := check_node(config, plays=True)) and "bubblewrap is missing" in wrong


def test_the_run_directory_is_the_jobs_unless_it_is_given(tmp_path: Path) -> None:
    config = composed("+experiment=quickstart", run__root=str(tmp_path))
    assert run_directory(config, "7_1") == tmp_path / "quickstart" / "slurm-7_1"
    config.run.dir = str(tmp_path / "mine")
    assert run_directory(config, "7_1") == tmp_path / "mine"


def test_a_job_must_have_the_nodes_that_the_config_asks_for() -> None:
    config = composed("+experiment=quickstart", trainer__nnodes=3)
    check_job(config, [3])
    check_job(config, [4])  # the fourth only runs episodes
    check_job(config, [3, 1, 1])
    with pytest.raises(ConfigError, match=r"asks for 3 nodes .*, the job has 2"):
        check_job(config, [2, 2])
    with pytest.raises(ConfigError, match="4 parts"):
        check_job(config, [3, 1, 1, 1])
    with pytest.raises(ConfigError, match=r"asks for 3 nodes \(trainer.nnodes=3\), the job has 2; sbatch --nodes=3"):
        check_job(config, [2])
    check_job(config, [3], left_s=1801)
    with pytest.raises(ConfigError, match=r"run\.grace_s=1800 is not less than the 1200 s .* give a longer --time"):
        check_job(config, [3], left_s=1200)
    with_stage = composed("+experiment=quickstart", cluster__stage_dir="/local")
    with pytest.raises(ConfigError, match=r"cluster\.stage_dir: this experiment makes its data"):
        check_job(with_stage, [1])
    config.trainer.v1.trainer_mode = "separate_async"
    config.actor_rollout_ref.rollout.nnodes = 2
    with pytest.raises(ConfigError, match="asks for 5 nodes"):
        check_job(config, [4])


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
    file = Path(__file__).parents[3] / "scripts" / "slurm" / "seeds.txt"
    assert [sweep_line(file, str(task)) for task in (1, 2, 3)] == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert compose(["+experiment=quickstart", *sweep_line(file, "2")]).seed == 2


async def test_a_job_that_never_comes_to_the_training_ends_at_its_third_fruitless_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Nothing of the nodes is looked at, and a warning comes while images are pulled."""
    pulled = iter([0, 5, 5, 5, 5])

    async def checked(*_: Any) -> None:
        pass

    async def warned(nodes: Any, config: Any, run_dir: Path, logs: Path, say: Any) -> None:
        (logs / starts.IMAGES).write_text(f"{next(pulled)}\n")
        raise StartStopped("SIGUSR1")

    monkeypatch.setattr("rl.cluster.head.set_up", lambda config: [])
    monkeypatch.setattr("rl.cluster.head._checked", checked)
    monkeypatch.setattr("rl.cluster.head._prepared", warned)
    monkeypatch.setenv("RL_WARNING", str(tmp_path / "warning"))
    run_dir = tmp_path / "run"
    config = composed("+experiment=quickstart", run__dir=str(run_dir), cluster__preflight=False)

    async def start(number: int) -> None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        await head(replace(place("n1", 1, unused_tcp_port), attempt=number), config, [], run_dir, print)

    for number in range(4):  # the second has pulled something
        with pytest.raises(StartStopped):
            await start(number)
    with pytest.raises(starts.NoProgress, match=f"the last 2 starts of {run_dir} added no checkpoint"):
        await start(4)
    with pytest.raises(StartStopped):
        await start(0)  # by hand
    assert not (run_dir / "run.lease").exists()
    for number in stop.SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_starts_that_end_before_the_lease_count_too_though_they_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Nodes are still awaited when the warning comes: a start that never ends otherwise."""

    async def warned(*_: Any) -> None:
        raise StartStopped("SIGUSR1")

    monkeypatch.setattr("rl.cluster.head.set_up", lambda config: [])
    monkeypatch.setattr("rl.cluster.head._checked", warned)
    monkeypatch.setenv("RL_WARNING", str(tmp_path / "warning"))
    run_dir = tmp_path / "run"
    config = composed("+experiment=quickstart", run__dir=str(run_dir), cluster__preflight=False)

    async def start(number: int) -> None:
        await head(replace(place("n1", 1, unused_tcp_port), attempt=number), config, [], run_dir, print)

    for number in range(2):
        with pytest.raises(StartStopped):
            await start(number)
    with pytest.raises(starts.NoProgress, match=f"the last 2 starts of {run_dir} added no checkpoint"):
        await start(2)
    assert not run_dir.exists()
    for number in stop.SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_node_says_how_many_images_it_has_and_notes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(sandbox: Any, logs: Path, tasks: Any, say: Any, count: Any) -> None:
        for ready in range(1, 31):
            count(ready, 30)
            assert (logs / starts.IMAGES).read_text() == f"{ready}\n"

    monkeypatch.setattr("rl.cluster.member.prepare_images", prepare)
    monkeypatch.setattr("rl.cluster.member.check_tasks", lambda config: [])
    config = composed("+experiment=quickstart", "sandbox=docker", prepare=None)
    said: list[str] = []
    assert prepare_node(config, True, tmp_path, said.append) == {}
    assert said == [f"images: {ready} of 30 ready" for ready in range(3, 30, 3)]


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


def test_limits_are_raised_and_low_ones_are_said() -> None:
    """In a process of its own, because hard limits cannot be raised again."""
    script = "import resource as r; from rl.cluster.limits import raise_limits; print(*raise_limits(), sep='\\n')"
    show = "; print(r.getrlimit(r.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 300; ulimit -Hn 900; exec '{sys.executable}' -c \"{script}{show}\""
    said = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert said.startswith("ulimit -n is 900, less than 16384: ") and said.endswith("(900, 900)\n")


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
    with pytest.raises(NodeError, match=r"n2: the head \(127.0.0.1, ports \d+\) does not answer"):
        await Link.open(place("n2", 2, unused_tcp_port, key="guess"), 1)
    with pytest.raises(NodeError, match=r"1 of 2 nodes have not called in 0 s \(here: n1\)"):
        await head.complete(0.1)
    assert head.peers == {} and not head.failed.done()
    await head.close(1)


async def test_a_taken_port_is_left_to_its_owner_who_never_learns_the_key(unused_tcp_port_factory: Any) -> None:
    heard: list[bytes] = []

    async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "mine"}\n{"welcome": true}\n')
        heard.append(await reader.readline())
        writer.close()

    ports = [unused_tcp_port_factory(), unused_tcp_port_factory()]
    taken = await asyncio.start_server(foreign, None, ports[0])
    head = Listener(replace(place("n1", 2, 0), ports=ports), print)
    await head.listen()
    link = await Link.open(replace(place("n2", 2, 0), ports=ports), 60)
    await head.complete(60)
    assert heard and b"secret" not in heard[0]
    with pytest.raises(NodeError, match=rf"n1: cannot listen on any of the ports {ports[0]}, {ports[1]}: "):
        await Listener(replace(place("n1", 2, 0), ports=ports), print).listen()
    await link.close()
    await head.close(60)
    taken.close()


def test_what_all_nodes_find_wrong_is_the_config_and_else_the_node(tmp_path: Path) -> None:
    config = composed("+experiment=quickstart", run__root=str(tmp_path))
    judge({"n1": "", "n2": ""}, config, True)
    with pytest.raises(ConfigError, match=r"^no model$"):
        judge({"n1": "no model", "n2": "no model"}, config, True)
    with pytest.raises(NodeError, match=r"^n1: no model$"):
        judge({"n1": "no model", "n2": ""}, config, True)
    with pytest.raises(NodeError, match=r"^n1: no file /1\ncluster: node n2: no file /2$"):
        judge({"n2": "no file /2", "n1": "no file /1"}, config, True)
    config.cluster.local_dir = "/proc/none"  # what no config is to blame for
    with pytest.raises(NodeError, match=r"^n1: cannot write$"):
        judge({"n1": "cannot write"}, config, True)


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


async def test_the_batch_scripts_warning_is_a_signal_whenever_it_came(tmp_path: Path) -> None:
    signals, warning = Signals(), tmp_path / "warning"
    watching = asyncio.ensure_future(signals.watch(warning))
    warning.touch()
    await asyncio.wait_for(watching, 60)
    with pytest.raises(StartStopped, match="SIGUSR1"):
        await signals.early
    for number in stop.SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.parametrize("number", stop.SIGNALS)
@pytest.mark.parametrize("moment", ["before Python", "imports"])
def test_a_signal_at_the_start_of_the_head_ends_it_with_75(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    """The real program, in a process as the batch script starts it: with the signals blocked."""
    environment = os.environ | TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1", "PYTHONPATH": str(ROOT)}
    kill = f"kill -{int(number)} $$; " if moment == "before Python" else ""
    code = f'{kill}exec "$@"'
    command = ["env", "--block-signal=USR1,TERM", "bash", "-c", code, "bash", sys.executable, "-X", "importtime"]
    process = subprocess.Popen(
        [*command, "-m", "rl.cluster", "+experiment=quickstart", f"run.root={tmp_path}"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        while moment == "imports" and "asyncio" not in process.stderr.readline():
            assert process.poll() is None
        if moment == "imports":
            process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and f"cluster: stopped by {number.name} before the training began\n" in said
    assert not list(tmp_path.rglob("ray_dir*"))


async def test_the_jobs_exit_code_follows_from_the_trainers() -> None:
    signals = Signals()
    assert [signals.exit_code(code) for code in (0, 1, 2, 75, 143)] == [0, 1, 2, 75, 143]
    assert signals.exit_code(-9) == 137, "somebody else killed it"
    signals.seen = [signal.SIGUSR1]
    assert signals.exit_code(-signal.SIGUSR1) == 75, "not yet so far that it could handle the signal"
    signals.seen = [signal.SIGTERM, signal.SIGUSR1]
    assert signals.exit_code(-signal.SIGUSR1) == 75, "nor for the second"
    signals.seen = [signal.SIGUSR1, signal.SIGTERM]
    assert signals.exit_code(-signal.SIGTERM) == 143
    for number in stop.SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
