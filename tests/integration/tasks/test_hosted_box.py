"""examples/hosted_box, with a stand-in for Modal's service."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from rewards.task import Task
from rl.config.compose import compose
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox import SandboxError
from tests.docker_kit import base_image
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.modal_kit import replace_service
from tests.packages_kit import install

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


async def test_an_episode_is_played_and_its_patch_graded(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's socket gets into the box, which has no network, and the box of the grading takes the tests."""
    install(ROOT / "examples" / "own_agent", tmp_path / "agent", monkeypatch)
    install(ROOT / "examples" / "hosted_box", tmp_path / "box", monkeypatch)
    replace_service(monkeypatch)
    config = compose(["agent=shell", "sandbox=modal", f"sandbox.image={base_image()}"], "evaluate")
    agent = agent_from(config, max_tokens=5000, max_context=50_000)
    assert task.patch is not None
    script = in_turn(
        call("Bash", command="setsid sleep 1000 >/dev/null 2>&1 & id -u; ls /sys/class/net; touch /usr/x"),
        call("Bash", command=f"printf %s {shlex.quote(task.patch)} | git apply"),
        "Done.",
    )
    proxy = ProxyServer()
    await proxy.start()
    try:
        setup = Setup(char_policy(scripted(script)), proxy, kind_of(config.sandbox).boot(agent), agent)
        episode = await run_episode(setup, task, "e")
    finally:
        await proxy.stop()
    assert episode.verdict.reason is None, episode.verdict
    check_record(episode, tmp_path)
    assert episode.session is not None and episode.session.relayed


async def test_a_box_keeps_the_protocol(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(ROOT / "examples" / "hosted_box", tmp_path / "box", monkeypatch)
    replace_service(monkeypatch)
    sandbox = compose(["sandbox=modal", f"sandbox.image={base_image()}"], "evaluate").sandbox
    box = await kind_of(sandbox).boot()(task, None)
    try:
        said = await box.exec(["sh", "-c", "cat; echo $X >&2; exit 3"], env={"X": "y"}, timeout_s=60, stdin=b"in\0put")
        assert (said.returncode, said.stdout, said.stderr) == (3, b"in\0put", b"y\n")
        late = await box.exec(["sh", "-c", "setsid sleep 1000 & echo begun; sleep 1000"], env={}, timeout_s=3)
        assert (late.timed_out, late.returncode, late.stdout) == (True, None, b"begun\n")
        left = await box.exec(["sh", "-c", "grep -l sleep /proc/[0-9]*/comm | wc -l"], env={}, timeout_s=60)
        assert left.stdout == b"1\n"  # the sandbox's own
        await box.put("new/file", b"\xff")
        assert await box.get("new/file") == b"\xff"
        await box.exec(["ln", "-s", "/etc", "link"], env={}, timeout_s=60)
        with pytest.raises(FileNotFoundError):
            await box.get("link/passwd")
        with pytest.raises(SandboxError, match="put_failed"):
            await box.put("link/passwd", b"")
        patch = await box.diff()
        assert patch.count(b"diff --git") == 2 and b"mode 120000" in patch and b"+\xff" in patch
    finally:
        await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.exec(["true"], env={}, timeout_s=60)
    await asyncio.wait_for(box.close(), 60)
