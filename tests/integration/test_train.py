"""The whole trainer on a CPU: three GRPO steps with the toy policy, killed in the second and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def start(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "rl.train", "+experiment=quickstart", f"run.root={out}"]
    command += [
        "trainer.experiment_name=toy",
        "prepare=toy_run.make:prepare",
        "actor_rollout_ref.rollout.agent.default_agent_loop=toy",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE}/toy_run/agent_loops.yaml",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    ]
    path = os.pathsep.join([str(HERE / ""), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children(root: int) -> set[int]:
    import psutil

    return {process.pid for process in psutil.Process(root).children(recursive=True)}


def gone(pids: set[int], seconds: float) -> bool:
    import psutil

    end = time.monotonic() + seconds
    while alive := [p for p in pids if psutil.pid_exists(p)]:
        if time.monotonic() > end:
            print("still there:", [psutil.Process(p).cmdline()[:3] for p in alive])
            return False
        time.sleep(0.5)
    print(f"all gone {time.monotonic() - end + seconds:.0f} s after the kill")
    return True


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_training_survives_kill_9(tmp_path):
    killed = start(tmp_path)
    for line in killed.stdout:
        if "step 1/3" in line:
            break
    time.sleep(2)
    started = children(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # Ray's reaper ends the cluster at once; its two agents see by themselves that the raylet is gone.
    assert started and gone(started, 300), "a killed run left processes"

    resumed = start(tmp_path)
    text, _ = resumed.communicate()
    assert resumed.returncode == 0, text
    assert "continuing from step" in text

    (run,) = (tmp_path / "toy").iterdir()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record["training/rollout_actor_probs_pearson_corr"] >= 0.99
        assert record["episode/count"] == 32
    assert (run / "curve.png").exists() and (run / "done").exists()
    assert not (run / "ray_dir").exists()
