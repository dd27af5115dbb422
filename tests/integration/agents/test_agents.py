"""This module tests the real programs of agents other than Claude Code: each plays the same scenes in a bubblewrap box,
through the forwarder and the real proxy, and each scene ends in the audit.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from rollout.agent import AgentRun, Status
from rollout.agent.codex import Codex
from rollout.agent.command import CommandAgent
from rollout.agent.gemini_cli import GeminiCli
from rollout.agent.headless import Headless
from rollout.agent.mini_swe_agent import MiniSweAgent
from rollout.agent.opencode import OpenCode
from rollout.agent.openhands import OpenHands
from rollout.agent.qwen_code import QwenCode
from rollout.audit import audit_roles
from rollout.records.reading import Reader
from rollout.sandbox import WORKDIR, Sandbox
from rollout.sandbox.docker.box import boot_docker
from rollout.sandbox.sealing import Source
from tests.docker_kit import base_image
from tests.integration.agents_kit import agent_stage, needs
from tests.integration.claude_kit import Moody, Script, call, failing, scripted
from tests.kit import char_policy

pytestmark = pytest.mark.asyncio


def answers(prompt: str) -> int:
    """Return the number of replies so far. Some system prompts have conversations in them."""
    return prompt[prompt.index("MAIN: " if "MAIN: " in prompt else "SUB: ") :].count("assistant: ") - 1


def in_turn(*replies: str) -> Script:
    return lambda prompt: replies[min(answers(prompt), len(replies) - 1)]


def bash(command: str) -> str:
    return call("bash", command=command)


@dataclass(frozen=True)
class Way:
    """A Way is how one agent is played. ``run``: the call that runs a command; ``end``: its last reply."""

    kind: type[Headless]
    run: Callable[[str], str]
    end: str = "Done."
    settings: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "mini_swe_agent": Way(MiniSweAgent, bash, bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    "openhands": Way(OpenHands, lambda command: call("terminal", command=command)),
    "opencode": Way(OpenCode, lambda command: call("bash", command=command, description="Runs it")),
    "qwen_code": Way(QwenCode, lambda command: call("run_shell_command", command=command, is_background=False)),
    "codex": Way(Codex, lambda command: call("exec_command", cmd=command)),
    "gemini_cli": Way(GeminiCli, lambda command: call("run_shell_command", command=command)),
}
each = pytest.mark.parametrize("name", WAYS)

# What agents could take from a work tree.
PLANTED = (
    "AGENTS.md", "CLAUDE.md", "GEMINI.md", "QWEN.md", ".agents/agents/spy.md", ".openhands/agents/spy.md",
    ".openhands/microagents/repo.md", ".openhands/plugins/spy/skills/spy/SKILL.md", ".opencode/agent/spy.md",
)  # fmt: skip


@each
async def test_an_episode_is_one_row(name: str, task: Task, tmp_path: Path) -> None:
    """Text, thinking, a failing command, calls at once, a result that the agent shortens; no orders from the tree."""
    way = WAYS[name]
    replies = in_turn(
        "((Hm.))I look." + way.run("echo one; exit 3"),
        way.run("echo two") + way.run("echo three"),
        way.run("yes 0123456789 | head -c 300000"),
        way.end,
    )
    async with agent_stage(way.kind, scripted(replies), task, **way.settings) as stage:
        # Gemini CLI has no setting that keeps it from GEMINI.md.
        for path in PLANTED if name != "gemini_cli" else {*PLANTED} - {"GEMINI.md"}:
            await stage.box.put(f"{WORKDIR}/{path}", b"---\nname: spy\ndescription: XYZZY\n---\nXYZZY")
        run = await stage.play("MAIN: fix it")
        assert (run.status, run.turns) == (Status.FINISHED, 4), run
        assert not any(words in request.text() for request in stage.requests for words in ("XYZZY", "\\u001b"))
        stage.check(tmp_path, rows=1)
        said = stage.requests[-1].text()
        assert all(words in said for words in ("one", "two", "three", "0123456789"))
        assert len(said) < 300_000 or name == "codex"
        shown = [block for event in run.events for block in (event.get("message") or {}).get("content", ())]
        assert any("two" in str(block) for block in shown)


async def test_openhands_still_takes_plugins_and_agents_of_a_work_tree() -> None:
    """OpenHands still has what rollout/agent/openhands_run.py replaces, also where it asks for a reply."""
    needs(OpenHands)
    assert OpenHands.PROGRAM
    (package,) = OpenHands.PROGRAM.directory.glob("lib/python3.*/site-packages/openhands/sdk")
    text = (package / "conversation/impl/local_conversation.py").read_text()
    assert re.search(r"load_available_plugins\(\s+work_dir=self.workspace.working_dir,\s+include_user=True,", text)
    assert "        register_file_agents(self.workspace.working_dir)\n" in text
    assert "litellm_completion(" in (package / "llm/llm.py").read_text()


@pytest.mark.docker
@each
async def test_in_a_container(name: str, task: Task, tmp_path: Path) -> None:
    """Its image has nothing of the agent's; its changes become the patch."""
    way = WAYS[name]

    async def boot(snapshot: Path | None, **options: Any) -> Sandbox:
        return await boot_docker(Source(await asyncio.to_thread(base_image)), snapshot=snapshot, **options)

    replies = in_turn(way.run("echo one >new.txt; cat /etc/hostname"), way.end)
    async with agent_stage(way.kind, scripted(replies), task, boot=boot, **way.settings) as stage:
        run = await stage.play("MAIN: fix it")
        assert (run.status, run.turns) == (Status.FINISHED, 2), run
        assert "sandbox" in stage.requests[-1].text() and b"+one" in await stage.box.diff()
        stage.check(tmp_path, rows=1)


@each
async def test_a_tool_that_is_not_there_and_an_engine_that_fails(name: str, task: Task, tmp_path: Path) -> None:
    way = WAYS[name]
    replies = iter([way.run("echo one"), call("no_such_tool", x=1), way.end])
    rows = 2 if name == "mini_swe_agent" else 1  # which drops a reply without a proper call from its history
    async with agent_stage(way.kind, Moody(lambda prompt: next(replies), failing(2)), task, **way.settings) as stage:
        run = await stage.play("MAIN: fix it")
        assert run.status is Status.FINISHED, run
        assert stage.session.counters.engine_errors == 1
        stage.check(tmp_path, rows=rows)


@each
async def test_an_agent_that_is_killed_while_it_waits(name: str, task: Task, tmp_path: Path) -> None:
    way, asked = WAYS[name], asyncio.Event()

    async def mood(number: int, prompt: str) -> None:
        if number == 2:
            asked.set()
            await asyncio.Event().wait()

    engine = Moody(in_turn(way.run("echo one"), way.end), mood)
    async with agent_stage(way.kind, engine, task, **way.settings) as stage:
        playing = asyncio.ensure_future(stage.play("MAIN: fix it"))
        await asyncio.wait([playing, asyncio.ensure_future(asked.wait())], return_when=asyncio.FIRST_COMPLETED)
        playing.cancel()
        await asyncio.wait([playing])
        async with asyncio.timeout(60):
            while not engine.aborted:
                await asyncio.sleep(0.01)
        stage.runs.append(AgentRun(Status.TIMEOUT, stage.session.turns(), "", []))
        stage.check(tmp_path, rows=1)


def spawning(prompt: str) -> str:
    """Start an agent of Codex's and wait for its end."""
    if not answers(prompt):
        return call("multi_agent_v1__spawn_agent", message="SUB: look")
    known = re.search(r'agent_id"?: ?"([\w-]+)', prompt)
    return call("multi_agent_v1__wait_agent", targets=[known[1] if known else ""]) if answers(prompt) == 1 else "Done."


GOES_DEEP = {"agent_name": "codebase_investigator", "prompt": "SUB: look"}
REPORT = {"SummaryOfFindings": "It is there.", "ExplorationTrace": [], "RelevantLocations": []}
SUBS: dict[str, Script] = {
    "openhands": in_turn(call("task", prompt="SUB: look", subagent_type="general-purpose"), "Done."),
    "opencode": in_turn(call("task", description="d", prompt="SUB: look", subagent_type="general"), "Done."),
    "qwen_code": in_turn(call("agent", description="d", prompt="SUB: look", subagent_type="general-purpose"), "Done."),
    "codex": spawning,
    "gemini_cli": in_turn(call("invoke_agent", **GOES_DEEP), "Done."),
}
# Its type, where it is not general-purpose.
TYPES = {"opencode": "general", "codex": "default", "gemini_cli": "codebase_investigator"}


@pytest.mark.parametrize("name", SUBS)
async def test_a_sub_agent_is_a_row_of_its_own(name: str, task: Task, tmp_path: Path) -> None:
    """Its calls have the role that the config can name, also where the agent reports them."""
    way = WAYS[name]
    gemini = name == "gemini_cli"  # whose sub-agents have tools that read, and one that ends them
    run, end = (
        (call("glob", pattern="*"), call("complete_task", report=REPORT)) if gemini else (way.run("ls"), "It is there.")
    )
    looks = in_turn(f"I look.{run}", end)
    engine = scripted(lambda prompt: SUBS[name](prompt) if "MAIN" in prompt else looks(prompt))
    policy = replace(char_policy(engine), roles={})
    async with agent_stage(way.kind, engine, task, policy=policy, **way.settings) as stage:
        played = await stage.play("MAIN: fix it")
        assert played.status is Status.FINISHED, played
        assert "It is there." in stage.requests[-1].text()
        stage.check(tmp_path, rows=2)
    (record,) = Reader(tmp_path)
    roles = Counter(node.role for node in record.nodes if node.logprobs is not None)
    assert roles.pop(f"subagent/{TYPES.get(name, 'general-purpose')}") == 2 and roles.keys() == {"main"}
    assert [*audit_roles(record)] == []


# How each is asked for a summary, and the context in which it becomes full.
SUMS_UP = {
    "codex": ("CONTEXT CHECKPOINT", 45_000),
    "openhands": ("context-aware state summary", 45_000),
    "opencode": ("Create a new anchored summary", 45_000),
    "qwen_code": ("when its context window is about to overflow", 100_000),
}


@pytest.mark.parametrize("name", SUMS_UP)
async def test_a_summary_when_the_context_is_full(name: str, task: Task, tmp_path: Path) -> None:
    """Three rows: until the summary, the summary, and what comes after it."""
    long = "yes 01234567890123456789012345678901234567890123456789 | head -100"
    way, (asks, size), calls = WAYS[name], SUMS_UP[name], [0]

    def replies(prompt: str) -> str:
        calls[0] += 1
        if asks in prompt and "All that was done." not in prompt:
            return "All that was done."
        return f"Text.{way.run(f'echo {calls[0]}; {long}')}" if calls[0] < 9 else "Done."

    async with agent_stage(way.kind, scripted(replies), task, max_context=size) as stage:
        run = await stage.play("MAIN: fix it")
        assert run.status is Status.FINISHED, run
        assert "All that was done." in stage.requests[-1].text()
        stage.check(tmp_path, rows=3)


SCRIPT = """
import http.client, json, os, sys
messages = [{"role": "user", "content": sys.stdin.read()}]
assert open(sys.argv[2]).read() == messages[0]["content"]
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"))
for turn in range(2):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    head = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, head)
    said = json.load(connection.getresponse())["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
print(said)
"""


async def test_any_command_is_an_agent(task: Task, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    settings = {
        "command": ["python3", str(tmp_path / "agent.py"), "{base_url}", "{prompt_file}"],
        "env": {"MODEL": "{model}", "KEY": "{secret}"},
        "shows": [str(tmp_path / "agent.py")],
    }
    async with agent_stage(CommandAgent, scripted(in_turn("One.", "Two.")), task, **settings) as stage:
        run = await stage.play("MAIN: fix it")
        assert (run.status, run.detail, run.turns, run.replies) == (Status.FINISHED, "Two.", 2, None)
        stage.check(tmp_path / "record", rows=1)
