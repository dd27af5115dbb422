"""The fault suite breaks episodes in containers that count their attempts, and a container engine of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewards.task import Task
from rewards.verdict import Reason
from rl.config.compose import compose
from rl.episodes.boxes import kind_of
from rl.metrics.episodes import fold
from rl.train.agent_loop import outputs
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Episode, Setup, play
from rollout.figures import line
from rollout.proxy.server import ProxyServer
from rollout.records import record_of
from rollout.sandbox import Sandbox
from rollout.sandbox.docker import engine as docker_engine
from rollout.sandbox.docker.box import DockerSandbox
from tests.docker_kit import left, made, task_images
from tests.integration.claude_kit import call, in_turn, scripted
from tests.kit import char_policy
from tests.sandboxes import alive


def repairing(task: Task, *first: str) -> Callable[[str], str]:
    """A script that makes the calls of `first`, then solves the task."""
    assert task.patch is not None
    old, new = (line[1:] for line in task.patch.splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++"))
    (file,) = (path.name for path in task.snapshot.glob("*.py"))
    edit = call("Edit", file_path=file, old_string=old, new_string=new)
    return in_turn(*first, call("Read", file_path=file), edit, "Done.")


@dataclass
class Stand:
    """Episodes of one task, in containers, and what is known of them from outside.

    kind: of boxes, docker or ssh.
    boxes: of agents and of gradings, in the order of their boots. kept: the attempts that ended. nap: a duration for
    `sleep` that no other process has.
    """

    task: Task
    proxy: ProxyServer
    scratch: Path
    kind: str = "docker"
    boxes: dict[str, list[DockerSandbox]] = field(default_factory=lambda: {"agent": [], "grading": []})
    kept: list[Episode] = field(default_factory=list)
    nap: str = field(default_factory=lambda: f"{random.randrange(10**4, 10**5)}.{random.randrange(10**6, 10**7)}")

    def setup(self, *scripts: Callable[[str], str], options: tuple[str, ...] = (), **agent: Any) -> Setup:
        """One script for each attempt, the last one for all others. options: of the sandbox's config."""
        base = made(task_images().base_image, docker_engine.get_engine())
        composed = compose([f"sandbox={self.kind}", f"sandbox.base_image={base}", *options])

        async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
            box = await inner(task, socket_dir)
            assert isinstance(box, DockerSandbox)
            self.boxes["agent" if socket_dir else "grading"].append(box)
            return box

        def script(prompt: str) -> str:
            return scripts[min(len(self.boxes["agent"]), len(scripts)) - 1](prompt)

        settings = {
            "max_turns": 9,
            "timeout_s": 90,
            "max_tokens": 2000,
            "bare": True,
            "tools": ("Edit", "Read", "Bash"),
        }
        played = ClaudeCode(find_binary(None), system_prompt="Repair the code.", **{**settings, **agent})
        inner = kind_of(composed.sandbox).boot(played)
        return Setup(char_policy(scripted(script)), self.proxy, boot, played, grade_timeout_s=60, scratch=self.scratch)

    def sleeping(self) -> Callable[[str], str]:
        """A script whose agent waits for a fault, and does not repair anything."""
        return in_turn(call("Bash", command=f"sleep {self.nap}"), "Done.")

    async def play(self, setup: Setup, fault: Callable[[], Awaitable[None]] | None = None, times: int = 1) -> Episode:
        """An episode during which `fault` happens, `times` times: each time that a box sleeps."""
        playing = asyncio.ensure_future(play(setup, self.task, "e", self.kept.append))
        for _ in range(times if fault else 0):
            await self.until(lambda: alive(self.nap), playing)
            await fault()
            await self.until(lambda: not alive(self.nap), playing)
        return await playing

    async def until(self, reached: Callable[[], bool], playing: asyncio.Future[Any]) -> None:
        while not reached():
            assert not playing.done(), playing
            await asyncio.sleep(0.02)

    def check(self, *reasons: Reason | None) -> None:
        """Check how each attempt ended (None: resolved), what came of it for training, and how it is counted."""
        assert tuple(episode.verdict.reason for episode in self.kept) == reasons, [e.verdict for e in self.kept]
        counts = fold([line(record_of(episode, "train", 1, "chars", "kit")) for episode in self.kept], "episode")
        infra = [reason for reason in reasons if reason is not None and reason.is_infra]
        assert counts["infra/failures"] == len(infra) and counts["episode/count"] == len(reasons) - len(infra)
        for episode, reason in zip(self.kept, reasons, strict=True):
            if reason is not None:
                assert counts[f"{'infra' if reason.is_infra else 'failure'}/{reason}"] == reasons.count(reason)
            if reason in infra:
                assert episode.verdict.reward is None and list(episode.rows) == [] and outputs(episode) == []
                assert episode.verdict.detail
            else:
                assert episode.verdict.reward == float(reason is None)
                assert [out.reward_score for out in outputs(episode)] == [float(reason is None)]
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is left: containers, processes, sessions, sockets, directories."""
        assert left(docker_engine.get_engine()) == [] and not alive(self.nap)
        assert self.proxy.sessions == {} and self.proxy._sockets == {}
        assert list(self.scratch.iterdir()) == []
