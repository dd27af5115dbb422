"""This module tests what only boxes in pods have: a cluster between them and the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kubernetes_boxes.box import boot_pod
from rewards.task import Task, load_tasks
from rl.quickstart.tasks import make_tasks
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox import Sandbox
from rollout.sandbox.sealing import Source
from tests.docker_kit import base_image
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.kube_kit import Cluster

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.xdist_group("kubernetes")]


async def test_an_episode_of_the_real_claude_code(own_cluster: Cluster, tmp_path: Path) -> None:
    """The agent's box and the one for grading are pods; the proxy is outside of the cluster."""
    await asyncio.to_thread(make_tasks, tmp_path, seed=1, n_train=1, n_heldout=1)
    (task,) = load_tasks(tmp_path / "train.parquet")
    agent = ClaudeCode(find_binary(None), 8, 180, 2000, system_prompt="Do.", tools=("Bash",), bare=True)
    shown = {path: str(path) for path in agent.programs}

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        binds = shown if socket_dir else None
        source, snapshot = Source(base_image()), task.snapshot
        return await boot_pod(source, own_cluster.pods(), snapshot=snapshot, binds=binds, socket_dir=socket_dir)

    script = f"git apply <<'EOF'\n{task.patch}\nEOF"
    policy = char_policy(scripted(in_turn(call("Bash", command=script), "Done.")))
    proxy = ProxyServer()
    await proxy.start()
    try:
        episode = await run_episode(Setup(policy, proxy, boot, agent, 120), task, "e")
    finally:
        await proxy.stop()
    assert (episode.verdict.reason, episode.verdict.reward) == (None, 1.0), (episode.verdict, episode.agent)
    (row,) = check_record(episode, tmp_path / "records").rows
    assert len(row.nodes) == 2 and own_cluster.names() == []
    print(episode.timing)
