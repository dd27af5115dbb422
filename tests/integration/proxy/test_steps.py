"""Tasks with steps: the real Claude Code gets several instructions in one box, and each is graded in fresh ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewards.grade import grade, grade_gold
from rewards.grading import Grading
from rewards.harbor import Harbor
from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.agent import STEP
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Episode, Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox import Sandbox
from rollout.sandbox.local.box import boot_local
from tests.integration.claude_kit import Script, call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.sandboxes import sh


class Stepped(Harbor):
    """A grader with Harbor's steps, whose tests are scripts in the row; local boxes can run them."""

    def check(self, task: Task) -> None:
        pass

    async def solve(self, task: Task, box: Sandbox) -> None:
        await sh(box, task.asked["solve"])

    async def judge(self, grading: Grading) -> Verdict:
        done = await grading.run(grading.task.asked["test"])
        return Verdict(None if done.returncode == 0 else Reason.TESTS_FAILED)


ONE = {"name": "one", "statement": "MAIN one", "test": "test -e one && ! test -e hidden", "solve": "touch one"}
TWO = {"name": "two", "statement": "MAIN two", "test": "test -e one && test -e two", "solve": "touch two"}


def stepped(task: Task, *steps: dict[str, Any], **asked: Any) -> Task:
    read = {"mode": "separate", "threshold": 1.0, "timeout_s": 30.0, "steps": steps or (ONE, TWO), **asked}
    grader = f"{__name__}:Stepped"
    return replace(task, grader=grader, grading=json.dumps(read), patch=None, problem_statement="MAIN one\n\nMAIN two")


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    server = ProxyServer()
    await server.start()
    yield server
    await server.stop()


async def played(proxy: ProxyServer, task: Task, script: Script, **more: Any) -> Episode:
    binary = find_binary(None)

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        binds = {binary: str(binary)} if socket_dir else None
        return await boot_local(task.snapshot, binds=binds, socket_dir=socket_dir)

    settings: dict[str, Any] = {"system_prompt": "Do.", "tools": ("Bash",), "bare": True}
    agent = more.pop("kind", ClaudeCode)(binary, more.pop("turns", 8), 180, 2000, **settings)
    return await run_episode(Setup(char_policy(scripted(script)), proxy, boot, agent, 30, **more), task, "e")


def make(*names: str) -> Sequence[str]:
    """Return the replies of a step in which files are made; nothing is prepared for the tests of an earlier one."""
    return call("Bash", command=f"ls; touch {' '.join(names)}"), "Done."


async def test_steps_are_one_conversation_in_one_box(proxy: ProxyServer, task: Task, tmp_path: Path) -> None:
    episode = await played(proxy, stepped(task), in_turn(*make("one"), *make("two")))
    assert (episode.verdict.reason, episode.verdict.reward) == (None, 1.0), (episode.verdict, episode.agent)
    assert b"b/one" in episode.patch and b"b/two" in episode.patch
    assert episode.agent is not None and episode.agent.turns == 4 and proxy.sessions == {}
    assert [event["ended"] for event in episode.agent.events if event.get("type") == STEP] == ["finished"]
    record = check_record(episode, tmp_path)
    (row,) = record.rows
    assert len(row.nodes) == 4
    said = [node.says.decode() for node in record.nodes if node.says]
    assert "MAIN two" not in said[0] and "MAIN two" in said[2]  # nobody knows the second step before the first is done


class Forgetful(ClaudeCode):
    """Claude Code, as an agent that cannot continue."""

    continued = property()  # type: ignore[assignment]


async def test_an_agent_that_cannot_continue_begins_a_conversation_in_the_same_box(
    proxy: ProxyServer, task: Task, tmp_path: Path
) -> None:
    def script(said: str) -> str:
        return in_turn(*make("one" if "MAIN one" in said else "two"))(said)

    episode = await played(proxy, stepped(task), script, kind=Forgetful)
    assert (episode.verdict.reason, episode.verdict.reward) == (None, 1.0), (episode.verdict, episode.agent)
    assert [len(row.nodes) for row in check_record(episode, tmp_path).rows] == [2, 2]
    assert episode.agent is not None and episode.agent.turns == 4


async def test_a_step_below_its_least_reward_is_the_last(proxy: ProxyServer, task: Task, tmp_path: Path) -> None:
    gated = stepped(task, {**ONE, "min_reward": 1.0}, TWO)
    episode = await played(proxy, gated, in_turn(*make("other"), *make("two")))
    assert (episode.verdict.reason, episode.verdict.reward) == (Reason.TESTS_FAILED, 0.0)
    assert "1 of 2 steps" in episode.verdict.detail and proxy.sessions == {}
    record = check_record(episode, tmp_path)
    assert len(record.rows[0].nodes) == 2
    # Without one, it goes on, and the reward is the mean of both.
    episode = await played(proxy, stepped(task), in_turn(*make("one", "hidden"), *make("two")))
    assert (episode.verdict.reason, episode.verdict.reward) == (Reason.TESTS_FAILED, 0.5)
    check_record(episode, tmp_path / "second")


async def test_a_step_that_the_limit_of_turns_ends_is_followed_by_the_next(
    proxy: ProxyServer, task: Task, tmp_path: Path
) -> None:
    script = in_turn(*[call("Bash", command="touch one two")] * 8, "Done.")
    episode = await played(proxy, stepped(task), script, turns=5)
    assert episode.verdict.reward == 1.0 and not episode.overlong  # no limit ended the episode
    assert episode.agent is not None and (episode.agent.status, episode.agent.turns) == ("finished", 9)
    assert [event["ended"] for event in episode.agent.events if event.get("type") == STEP] == ["max_turns"]
    (row,) = check_record(episode, tmp_path).rows
    assert len(row.nodes) == 9  # one conversation


async def test_steps_are_played_where_nothing_is_graded(proxy: ProxyServer, task: Task) -> None:
    episode = await played(proxy, stepped(task), in_turn(*make("one"), *make("two")), grades=False)
    assert episode.verdict.reason is Reason.NOT_GRADED and b"b/two" in episode.patch


async def test_a_solution_is_played_and_graded_step_by_step(task: Task) -> None:
    async def boot() -> Sandbox:
        return await boot_local(task.snapshot)

    assert (await grade_gold(stepped(task), boot, timeout_s=30)).reason is None
    verdict = await grade(stepped(task), None, boot, timeout_s=30)
    assert (verdict.reason, verdict.reward) == (Reason.TESTS_FAILED, 0.0) and "2 of 2 steps" in verdict.detail
    lazy = {**TWO, "solve": ":"}
    verdict = await grade_gold(stepped(task, ONE, lazy), boot, timeout_s=30)
    assert (verdict.reason, verdict.reward) == (Reason.TESTS_FAILED, 0.5)
