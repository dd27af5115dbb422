"""This module tests Claude Code as an agent: its environment, command line and result, and how any agent is run in a
box.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf

from rl.episodes.boxes import FromImages, Kind
from rl.episodes.setup import agent_from
from rollout.agent import STEP, AgentRun, Status, joined, run_agent
from rollout.agent.claude_code import COVERS, ClaudeCode, find_binary
from rollout.agent.kept import AgentOutput
from rollout.sandbox import ExecResult, Limits, SandboxError

AGENT = ClaudeCode(binary=Path("/bin/claude"), max_turns=3, timeout_s=9, max_tokens=64)


def test_the_environment_is_built_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "real")
    env = AGENT.environment("secret", socket=Path("/s/p"))
    assert "real" not in env.values() and "PATH" not in env
    assert (env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_UNIX_SOCKET"]) == ("secret", "/s/p")
    # No name that resolves: a binary that ignored the socket would reach nothing.
    assert env["ANTHROPIC_BASE_URL"] == "http://proxy.invalid"


def test_without_a_socket_the_session_is_at_the_base_url() -> None:
    env = AGENT.environment("secret", base_url="http://127.0.0.1:1")
    assert "ANTHROPIC_UNIX_SOCKET" not in env and env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"


def test_the_command_line_has_what_the_settings_ask_for() -> None:
    plain = AGENT.argv("/h")
    assert plain[:2] == ["/bin/claude", "-p"] and "--bare" not in plain and "--tools" not in plain
    agent = replace(AGENT, system_prompt="s", tools=("Edit", "Read"), bare=True, extra_args=("--x",))
    argv = agent.argv("/h")
    assert argv[argv.index("--tools") + 1] == "Edit,Read" and argv[argv.index("--system-prompt") + 1] == "s"
    assert "--bare" in argv and argv[-1] == "--x"


@pytest.mark.parametrize(
    "project_settings, claude_md, options",
    [
        (False, False, ["--setting-sources=", "--strict-mcp-config"]),
        (False, True, ["--setting-sources=", "--add-dir", ".", "--strict-mcp-config"]),
        (True, True, ["--setting-sources=project,local"]),
    ],
)
def test_the_work_tree_configures_only_what_keys_allow(
    project_settings: bool, claude_md: bool, options: list[str]
) -> None:
    agent = replace(AGENT, project_settings=project_settings, claude_md=claude_md)
    argv = agent.argv("/h")
    assert argv[argv.index("--dangerously-skip-permissions") + 1 :] == options
    assert ("CLAUDE_CODE_DISABLE_CLAUDE_MDS" in agent.environment("s")) != claude_md


async def test_only_agents_boxes_from_images_have_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that has the file systems of images shows an agent's covers; no box for grading does."""
    given: list[Any] = []

    async def boot_box(self: Kind, task: Any, grading: bool, run: str, **common: Any) -> None:
        given.append(common["binds"])

    monkeypatch.setattr(Kind, "boot_box", boot_box)
    for kind in (Kind, FromImages):
        monkeypatch.setattr(kind, "limits", lambda self: Limits())
        for sockets in (Path("/s"), None):
            await kind(OmegaConf.create()).boot(AGENT)(SimpleNamespace(limits={}), sockets)  # type: ignore[arg-type]
    shown = {Path("/bin/claude"): "/bin/claude"}
    assert given == [shown, None, {**shown, **COVERS}, None] and [*COVERS.values()] == ["/etc/claude-code"]
    assert [path.name for path in next(iter(COVERS)).iterdir()] == ["README"]


def test_a_missing_binary_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"agent\.binary: .*claude"):
        find_binary(str(tmp_path / "claude"))
    (tmp_path / "claude").write_text("")
    with pytest.raises(FileNotFoundError, match="not an executable"):
        find_binary(str(tmp_path / "claude"))
    (tmp_path / "claude").chmod(0o755)
    assert find_binary(str(tmp_path / "claude")) == (tmp_path / "claude").resolve()


def test_the_wheel_carries_a_binary() -> None:
    assert os.access(find_binary(None), os.X_OK)


def test_the_config_names_the_agent(tmp_path: Path) -> None:
    (tmp_path / "claude").touch(mode=0o755)
    settings = {
        "binary": str(tmp_path / "claude"), "max_turns": 3, "timeout_s": 9, "system_prompt": None,
        "tools": ["Edit"], "bare": False, "extra_args": ["--x"],
    }  # fmt: skip
    made = agent_from(OmegaConf.create({"agent": {"kind": "claude_code", **settings}}), 64, 4096)
    wanted = replace(AGENT, binary=tmp_path / "claude", max_context=4096, tools=("Edit",), extra_args=("--x",))
    assert made == wanted
    assert agent_from(OmegaConf.create({"agent": settings}), 64, 4096) == wanted  # a run of an earlier version
    with pytest.raises(ValueError, match=r"agent\.kind is 'unheard'; it must be one of claude_code"):
        agent_from(OmegaConf.create({"agent": {"kind": "unheard", **settings}}), 64, 4096)


class Box:
    """Answers exec with a prepared result, and keeps what it was given."""

    home = "/home/agent"

    def __init__(self, **result: Any) -> None:
        fields: dict[str, Any] = {
            "returncode": 0, "stdout": b"", "stderr": b"", "timed_out": False, "truncated": False, "wall_s": 1.0,
        }  # fmt: skip
        self.result = ExecResult(**{**fields, **result})
        self.given: list[Any] = []

    async def put(self, path: str, data: bytes) -> None:
        self.given.append((path, data))

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        self.given.append((argv, options["stdin"], options["env"], options["timeout_s"]))
        return self.result


def result(**fields: Any) -> bytes:
    return json.dumps({"type": "result", "subtype": "success", "num_turns": 2, "result": "ok", **fields}).encode()


@pytest.mark.parametrize(
    "box, turns, status",
    [
        (Box(stdout=result()), 2, "finished"),
        (Box(stdout=result(subtype="error_max_turns", is_error=True)), 3, "max_turns"),
        (Box(stdout=result(is_error=True)), 2, "error"),
        (Box(stdout=b'{"type": "assis', timed_out=True, returncode=None), 0, "timeout"),
        (Box(stdout=b"not json\n[1]\n", stderr=b"boom", returncode=1), 0, "crashed"),
        # What the policy's commands may print: turns are the proxy's, and a limit is believed where it agrees.
        (Box(stdout=result(num_turns=1)), 9, "finished"),
        (Box(stdout=b'{"type": "result"}'), 1, "finished"),
        (Box(stdout=result(subtype="error_max_turns", is_error=True, num_turns=3)), 2, "error"),
    ],
)
async def test_how_a_run_ended(box: Any, turns: int, status: str) -> None:
    run = await run_agent(box, AGENT, "fix it", "secret", Path("/s"), lambda: turns)
    assert (run.status, run.turns) == (status, turns)
    assert run.status is not Status.CRASHED or "boom" in run.detail


async def test_without_a_limit_of_turns_none_is_believed() -> None:
    box: Any = Box(stdout=result(subtype="error_max_turns", is_error=True))
    run = await run_agent(box, replace(AGENT, max_turns=0), "fix it", "secret", Path("/s"), lambda: 30)
    assert run.status is Status.ERROR


@pytest.mark.parametrize("cause", ["put_failed", "no_space"])
async def test_in_a_later_step_what_the_agent_has_put_in_its_files_places_is_its_own_doing(cause: str) -> None:
    """The first time, it is the infrastructure's."""
    box: Any = Box(stdout=result())
    box.put = AsyncMock(side_effect=SandboxError(cause, "it is no directory"))
    agent: Any = SimpleNamespace(**{name: getattr(AGENT, name) for name in ("argv", "timeout_s")})
    agent.files = lambda: {".gemini/settings.json": b"{}"}
    run = await run_agent(box, agent, "go on", "secret", Path("/s"), lambda: 4, again=True)
    assert (run.status, run.turns, run.detail) == (Status.CRASHED, 4, f"{cause}: it is no directory")
    with pytest.raises(SandboxError, match=cause):
        await run_agent(box, agent, "begin", "secret", Path("/s"), lambda: 0)


async def test_the_replies_that_the_agent_reports() -> None:
    lines = [{"type": "assistant", "message": {"id": "msg_1"}}, {"type": "user", "message": {"id": "msg_2"}}]
    box: Any = Box(stdout=b"\n".join(json.dumps(line).encode() for line in lines) + b"\n" + result())
    run = await run_agent(box, AGENT, "fix it", "secret", Path("/s"), lambda: 1)
    assert run.replies == {"msg_1"}


async def test_another_agent_is_a_class_of_its_own() -> None:
    @dataclass(frozen=True)
    class Other:
        program: Path
        timeout_s: float

        def argv(self, home: str) -> list[str]:
            return [str(self.program), "exec"]

        def stdin(self, prompt: str) -> bytes:
            return prompt.encode()

        def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
            return {"KEY": secret, "SOCKET": str(socket)}

        def files(self) -> dict[str, bytes]:
            return {".other/config.toml": b"x = 1"}

        def result(self, done: ExecResult, turns: int) -> AgentRun:
            return AgentRun(Status.FINISHED, turns, done.stdout.decode(), [])

    box: Any = Box(stdout=b"done")
    run = await run_agent(box, Other(Path("/bin/other"), 7), "fix it", "secret", Path("/s"), lambda: 1)
    assert run == AgentRun(Status.FINISHED, 1, "done", [])
    file, started = box.given
    assert file == ("/home/agent/.other/config.toml", b"x = 1")
    assert started == (["/bin/other", "exec"], b"fix it", {"KEY": "secret", "SOCKET": "/s"}, 7)


async def test_a_later_step_goes_on_with_the_conversation() -> None:
    forged = b'{"type": "step", "ended": "timeout"}\n{"type": "result", "result": "Fine."}\n'
    box: Any = Box(stdout=forged)
    run = await run_agent(box, AGENT, "more", "secret", Path("/s"), lambda: 1, again=True)
    assert box.given[-1][0] == [*AGENT.argv(box.home), "--continue"]
    assert [event["type"] for event in run.events] == ["result"]  # nobody but us says where a step begins


def test_two_runs_become_one() -> None:
    first = AgentRun(Status.TIMEOUT, 2, "late", [{"type": "a"}], frozenset({"m1"}), AgentOutput(b"1", b"", {}, ["x"]))
    then = AgentRun(Status.FINISHED, 1, "done", [{"type": "b"}], frozenset({"m2"}), AgentOutput(b"2", b"", {"f": b""}))
    both = joined(first, then)
    assert (both.status, both.turns, both.detail, both.replies) == (Status.FINISHED, 3, "done", {"m1", "m2"})
    assert both.events == [{"type": "a"}, {"type": STEP, "ended": "timeout"}, {"type": "b"}]
    assert both.kept == AgentOutput(b"12", b"", {"f": b""}, ["x"])
    assert joined(first, replace(then, replies=None)).replies is None


def test_only_a_window_with_room_to_compact_is_told() -> None:
    name = "CLAUDE_CODE_MAX_CONTEXT_TOKENS"
    assert name not in replace(AGENT, max_context=4096).environment("secret")
    assert replace(AGENT, max_context=131072).environment("secret")[name] == "131072"
