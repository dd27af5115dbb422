"""What the fault suite breaks: episodes in containers that count their attempts, and a container engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import docker
from docker.errors import DockerException

from rewards.task import Task
from rewards.verdict import Reason
from rl.agent_loop import outputs
from rl.boxes import kind_of
from rl.config import compose
from rl.metrics.episodes import fold, line
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Episode, Setup, play
from rollout.proxy.server import ProxyServer
from rollout.records import record_of
from rollout.sandbox import Sandbox
from rollout.sandbox.docker import engine as docker_engine
from rollout.sandbox.docker import images
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

    boxes: of agents and of gradings, in the order of their boots. kept: the attempts that ended. nap: a duration for
    `sleep` that no other process has.
    """

    task: Task
    proxy: ProxyServer
    scratch: Path
    boxes: dict[str, list[DockerSandbox]] = field(default_factory=lambda: {"agent": [], "grading": []})
    kept: list[Episode] = field(default_factory=list)
    nap: str = field(default_factory=lambda: f"{random.randrange(10**4, 10**5)}.{random.randrange(10**6, 10**7)}")

    def setup(self, *scripts: Callable[[str], str], options: tuple[str, ...] = (), **agent: Any) -> Setup:
        """One script for each attempt, the last one for all others. options: of the sandbox's config."""
        base = made(task_images().base_image, docker_engine.get_engine())
        config = compose(["sandbox=docker", f"sandbox.base_image={base}", *options])
        binary = find_binary(None)
        inner = kind_of(config.sandbox).boot(binary)

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
        config = ClaudeCode(binary, system_prompt="Repair the code.", **{**settings, **agent})
        return Setup(char_policy(scripted(script)), self.proxy, boot, config, grade_timeout_s=60, scratch=self.scratch)

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
        """How each attempt ended (None: resolved), what came of it for training, and how it is counted."""
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


class OwnEngine:
    """An engine of its own: all that it has and leaves is in one directory, whose file system it may fill."""

    def __init__(self, directory: Path, data_mb: int) -> None:
        self.directory, self.url = directory, f"unix://{directory}/s"
        self.data = directory / "data"
        self.data.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={data_mb}m", "none", self.data], check=True, capture_output=True
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Blocks until it answers."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=self.directory, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(600):
            with contextlib.suppress(DockerException):
                docker.APIClient(self.url, version="auto", timeout=5).close()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError((self.directory / "log").read_text()[-1500:])

    def command(self) -> list[str]:
        """What is run, which must not use anything of other engines."""
        name = f"faults-{os.getpid()}"  # should there be a containerd that all engines share
        (self.directory / "none.json").write_text("{}")
        command = ["dockerd", "--host", self.url, "--data-root", f"{self.data}"]
        command += ["--exec-root", f"{self.directory}/exec", "--pidfile", f"{self.directory}/pid"]
        command += ["--config-file", f"{self.directory}/none.json"]
        command += ["--containerd-namespace", name, "--containerd-plugins-namespace", f"{name}-plugins"]
        return [*command, "--iptables=false", "--ip6tables=false", "--bridge=none", "--shutdown-timeout=2"]

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)

    def fill(self, room: int = 0) -> None:
        """Leave so many bytes on the disk with its images and containers."""
        with open(self.data / "filler", "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            file.truncate(file.tell() - room)

    def make_room(self) -> None:
        (self.data / "filler").unlink()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def load(self, image: str) -> None:
        """Copy an image from the machine's engine."""
        source = docker_engine.ContainerEngine().client
        target = docker.APIClient(self.url, version="auto", timeout=120)
        target.load_image(source.get_image(image))
        target.close()

    def end(self) -> None:
        """Stop it, and what it has started and not ended itself."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounts if place.startswith(f"{self.directory}/")]):
            subprocess.run(["umount", "-l", place], check=True)


Own = TypeVar("Own", bound=OwnEngine)


@contextlib.contextmanager
def running(kind: type[Own], image: str, data_mb: int) -> Iterator[Own]:
    """An engine that runs and has the image, in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="cc-engine-") as directory:
        own = kind(Path(directory), data_mb=data_mb)
        try:
            own.start()
            own.load(image)
            yield own
        finally:
            own.end()


@contextlib.contextmanager
def used(own: OwnEngine, monkeypatch: Any) -> Iterator[None]:
    """This process talks to that engine."""
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", own.url)
        patch.setattr(docker_engine, "_engine", functools.cache(lambda pid: docker_engine.ContainerEngine()))
        patch.setattr(images, "_known", {})
        yield
        assert left(docker_engine.get_engine()) == []
