"""This module tests the whole line on a CPU: real Claude Code, verl, vLLM and SFT, at the smallest size that has every
part.

Killed with -9 after its first step and started again with the same command. Every box is a container without a network;
in the second step some are killed and hang, and an image is missing. One of the two tasks is a Harbor directory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest
from docker.errors import APIError

from rl import report
from rl.data import convert, export, images
from rl.run.weights import find_weights, merge
from rollout import audit
from rollout.records.reading import Reader
from rollout.sandbox.docker.engine import RUN, get_engine
from rollout.trace import trace
from tests import metric_docs
from tests.docker_kit import made, task_images
from tests.integration.process_kit import command_line, read_until, until
from tests.integration.train_kit import TINY, WarmStart, replace_image, start


def tensorboard_tags(run: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return set(events.Tags()["scalars"])


def gone(pids: set[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        if time.monotonic() > end:
            print("still there:", [psutil.Process(pid).cmdline()[:3] for pid in alive])
            return False
        time.sleep(0.5)
    return True


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.docker
@pytest.mark.timeout(2400)
def test_two_steps_in_containers_survive_kill_9_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = get_engine()
    image = made(task_images().base_image, engine)
    few = "quickstart.sft.epochs=3"  # what the policy knows does not matter here
    by_harbor = second_from_harbor(WarmStart.make(tmp_path, few).directory / "tasks" / "train.parquet", image)
    # Two tasks only, so that each step has both.
    boxes = ["sandbox=docker", f"sandbox.base_image={image}", "data.train_max_samples=2", "sandbox.warm=4"]
    # Both disturbances may meet one episode, which is then played a third time.
    boxes += ["+episode.figures.size=sys:getsizeof", "episode.infra_retries=2"]
    command = ["+experiment=quickstart", *TINY, few, f"run.root={tmp_path}", *boxes]
    killed = start(*command)
    command += ["store.url=http://127.0.0.1:9"]  # where nobody is; it is the same run
    read_until(killed, "step 1/2  resolved")  # not what a busy machine says before: "step 1/2  rollout"
    (run,) = (tmp_path / "quickstart").iterdir()
    sockets = [path.name for path in Path((run / "ray_dir").read_text()).iterdir() if path.is_socket()]
    assert any(re.fullmatch("[0-9a-f-]{36}", name) for name in sockets), "vLLM's sockets are elsewhere"
    started = psutil.Process(killed.pid).children(recursive=True)
    assert {child.nice() for child in started if child.is_running()} == {psutil.Process().nice()}, (
        "Ray lowers priorities"
    )
    # Ray's agents take minutes to notice; they are waited for at the end.
    agents = {child.pid for child in started if re.search("(Dashboard|RuntimeEnv)Agent", command_line(child))}
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    others = {child.pid for child in started} - agents
    assert others and gone(others, 300), "a killed run left processes"
    played = len(episodes(run, "train", step=1))  # those of a step without a checkpoint are played again
    records_before = len(list(Reader(run)))

    resumed = start(*command)
    try:
        assert "continuing from step 1" in read_until(resumed, "starting trainer")
        (prepared,) = (tmp_path / "prepared").iterdir()
        replace_image(prepared / "tasks" / "train.parquet", "localhost:1/no/such:1")
        until(resumed, lambda: kills(run))
        until(resumed, lambda: "box_killed" in episodes(run, "train"))
        until(resumed, lambda: pauses(run))
        text, _ = resumed.communicate()
    finally:
        resumed.terminate()
        resumed.wait()
    assert resumed.returncode == 0, text
    (left,) = re.findall(r"store: .* -m rl\.store (\S+) --url", text)
    assert left == str(run), "what did not reach the store is not said"

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert metrics[0]["val/count"] == metrics[2]["val/count"] == 4
    for record in metrics[1:]:
        assert record["training/rollout_actor_probs_pearson_corr"] >= 0.99
        assert record["episode/rows"] == 1.0
        assert record["proxy/overhead_ms"] > 0 and record["own/size"] > 0
        assert record["boxes/warm_hits"] > 0
    metric_docs.check(set().union(*metrics) - {"step", "time"})
    # Infrastructure is tried again, then left out: it is no reward of 0. A container that somebody else has stopped is
    # no agent that hangs.
    # The second one may meet a held-out episode.
    lost = metrics[2]["infra/box_killed"]
    assert lost + metrics[2].get("val/infra/box_killed", 0) == 2 and metrics[2]["infra/missing_image"] == 12
    assert metrics[2]["infra/failures"] == 12 + lost and metrics[2]["episode/count"] == 4
    assert len(episodes(run, "train")) == played + 4 + 12 + lost
    assert {line["reason"] for line in lines(run) if line["task"] == by_harbor and line["infra"]} <= {"box_killed"}

    records = list(Reader(run))
    assert len(records) > records_before
    assert not any(trace(record).silent for record in records), "no messages for the store"
    assert audit.main([str(run)]) == 0
    assert "ok:" in capsys.readouterr().out
    # The quickstart's preparation, which a second start found as the first had left it.
    assert audit.main([str(prepared / "warm")]) == 0
    assert (run / "curve.png").stat().st_size > 10_000
    assert (run / "done").exists() and not (run / "ray_dir").exists()
    assert list((run / "wandb").glob("offline-run-*/files/media/table/samples/episodes_*.table.json"))
    assert metrics[2].keys() - {"step", "time"} <= tensorboard_tags(run)
    assert report.main([str(run)]) == 0 and (run / "report.html").stat().st_size > 100_000
    assert json.loads((run / "run.json").read_text())["key"]
    check_merged(run, step=2)
    assert gone(agents, 300), "a killed run left Ray's agents"
    containers = engine.client.containers(all=True, filters={"label": f"{RUN}={run.name}"})
    assert containers == [], "containers are left"


def check_merged(run: Path, step: int) -> None:
    """Check that rl.evaluate serves a run's newest checkpoint, every weight of it, as bfloat16."""
    import torch
    from safetensors.torch import load_file

    weights = find_weights(str(run))
    assert weights.step == step and weights.run == run and weights.sharded is not None
    merge(weights.sharded, Path(weights.model), run / "merge.log")
    assert find_weights(str(run)).sharded is None
    merged = load_file(Path(weights.model) / "model.safetensors")
    trained = torch.load(weights.sharded / "model_world_size_1_rank_0.pt", weights_only=False)
    assert merged.keys() == trained.keys()
    for name, weight in trained.items():
        assert torch.equal(merged[name], weight.to_local().bfloat16()), name


def second_from_harbor(file: Path, image: str) -> str:
    """Let the second task of a file be a Harbor directory, as `rl.data.export` writes it; return its id."""
    place = file.parent
    assert export.main([str(file), "--base", image, "--out", str(place / "harbor")]) == 0
    assert convert.main(["harbor", str(place / "harbor"), "--out", str(place / "harbor.parquet")]) == 0
    assert images.main([str(place / "harbor.parquet"), "--out", str(place / "built.parquet")]) == 0
    ours, theirs = pyarrow.parquet.read_table(file), pyarrow.parquet.read_table(place / "built.parquet")
    second = ours["instance_id"][1].as_py()
    rows = [ours.slice(0, 1), theirs.filter(pyarrow.compute.equal(theirs["instance_id"], second)), ours.slice(2)]
    pyarrow.parquet.write_table(pyarrow.concat_tables(rows, promote_options="default"), file)
    return second


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of all attempts so far."""
    found = [file.read_text().splitlines() for file in (run / "episode_metrics").glob("*.jsonl")]
    return [json.loads(line) for line in itertools.chain(*found)]


def episodes(run: Path, split: str, step: int | None = None) -> list[str | None]:
    """Return how the attempts of a split (of all steps, or of one) have ended so far."""
    found = [line for line in lines(run) if line["split"] == split]
    return [line["reason"] for line in found if step in (None, line["step"])]


def kills(run: Path) -> bool:
    """End a container in which Claude Code works; tell whether there was one."""
    if not (box := working(run)):
        return False
    with contextlib.suppress(APIError):  # it has ended meanwhile
        get_engine().client.kill(box)
        return True
    return False


def pauses(run: Path) -> bool:
    """Stop a container in which Claude Code works; tell whether there was one."""
    if not (box := working(run)):
        return False
    with contextlib.suppress(APIError):  # it has ended meanwhile, or is about to
        get_engine().client.pause(box)
        if "stream-json" in str(get_engine().processes(box)):
            return True
        get_engine().client.unpause(box)  # its agent was done before
    return False


def working(run: Path) -> str:
    """The newest container of a run in which Claude Code works, if there is one."""
    for box in get_engine().client.containers(filters={"label": f"{RUN}={run.name}"}):
        with contextlib.suppress(APIError):  # it is gone
            if "stream-json" in str(get_engine().processes(box["Id"])):
                return box["Id"]
    return ""
