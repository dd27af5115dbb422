"""This module tests roles with the real Claude Code: sub-agents that are served untrained, or answered elsewhere.

The other endpoint is a second proxy with a fixed engine, as ``python -m rollout.proxy`` would be.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.agent import Status
from rollout.agent.claude_code import SUBAGENTS
from rollout.audit import audit_roles
from rollout.episode import Episode, infra_failure
from rollout.figures import line
from rollout.proxy.engine import EngineError
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.roles import Rule
from rollout.proxy.server import ProxyServer
from rollout.records import Record
from tests.integration.claude_kit import Moody, Script, Stage, call, check_record, in_turn, scripted, stage
from tests.integration.proxy.test_claude_threads import agent, with_subs
from tests.kit import char_policy

pytestmark = pytest.mark.asyncio

MAIN = in_turn(
    agent("one", "Explore", run_in_background=False) + agent("two", run_in_background=False),
    agent("three", "fork", run_in_background=False),
    "Done.",
)
SUB = in_turn(call("Bash", command="echo sub"), "I found it.")


def said(prompt: str) -> str:
    """Play all three: the fork's prompt has the main conversation and, last, what it is told."""
    if "MAIN" in prompt and "SUB three" in prompt.split("assistant: ")[-2].partition("<e>")[2]:
        return "Forked."
    return with_subs(MAIN, SUB)(prompt)


@asynccontextmanager
async def playing(task: Task, rules: Mapping[str, Rule], script: Script = said) -> AsyncIterator[Stage]:
    async with stage(scripted(script), task, policy=replace(char_policy(scripted(script)), roles=rules)) as played:
        await played.play("MAIN go.")
        yield played


def checked(played: Stage, directory: Path) -> Record:
    """Return the record of what was played, which the audit has nothing against."""
    session, run = played.session, played.runs[-1]
    session.disown(run.replies or ())
    verdict = Verdict(Reason.EMPTY_PATCH)
    found = session.tree.sequences()
    record = check_record(
        Episode("stage", played.task, 0, time.time(), verdict, session, run, b"", found, {}), directory
    )
    assert list(audit_roles(record)) == []
    return record


async def test_sub_agents_that_are_only_served(task: Task, tmp_path: Path) -> None:
    """Each type has its role, a fork's, too; only the main conversation and one type are trained on."""
    async with playing(task, {"subagent": Rule(False), "subagent/Explore": Rule()}) as played:
        assert (played.runs[-1].status, played.runs[-1].detail) == ("finished", "Done.")
        record = checked(played, tmp_path)
    roles = line(record)["roles"]
    assert {role: (one["calls"], one["rows"]) for role, one in roles.items()} == {
        "main": (3, 1),
        "subagent/Explore": (2, 1),
        "subagent/general-purpose": (2, 0),
        "subagent/fork": (1, 0),
    }
    assert record.agent["turns"] == roles["main"]["turns"] == 3
    assert {record.nodes[n].role for row in record.rows for n in row.nodes} == {"main", "subagent/Explore"}
    assert record.roles == {"subagent": {"train": False}, "subagent/Explore": {"train": True}}


async def test_sub_agents_that_another_endpoint_answers(task: Task, tmp_path: Path) -> None:
    """Their tokens are in no row, the record says who has answered, and the audit follows the agent's reports."""
    async with elsewhere(scripted(said)) as there, playing(task, {"subagent": Rule(False, there)}) as played:
        assert (played.runs[-1].status, played.runs[-1].detail) == ("finished", "Done.")
        record = checked(played, tmp_path)
        assert infra_failure(played.runs[-1], played.session) is None
        assert "I found it." in played.calls[-1].text()
        offered = played.calls[0].text()
    assert {node.role for node in record.nodes if node.logprobs is not None} == {"main"} and len(record.rows) == 1
    roles = line(record)["roles"]
    assert {role: one["calls"] for role, one in roles.items()} == {
        "main": 3,
        "subagent/Explore": 2,
        "subagent/general-purpose": 2,
        "subagent/fork": 1,
    }
    assert record.roles == {"subagent": {"train": False, "endpoint": there.url, "model": "fixed"}}
    assert {call.reply["model"] for call in record.calls} == {"fixed"} and there.key not in str(record)
    assert record.counters["unknown_reports"] == record.counters["foreign_calls"] == 0
    assert all(f"- {name}: " in offered for name in SUBAGENTS if name != "fork")


async def test_an_endpoint_that_fails_loses_the_episode_though_claude_code_finishes(task: Task) -> None:
    async def refuses(number: int, prompt: str) -> None:
        raise EngineError("broken", 400)

    async with elsewhere(Moody(SUB, refuses)) as there, playing(task, {"subagent": Rule(False, there)}) as played:
        assert played.runs[-1].status is Status.FINISHED
        verdict = infra_failure(played.runs[-1], played.session)
    assert verdict is not None and verdict.reason is Reason.ENGINE_FAILED and "subagent/" in verdict.detail


async def test_a_main_conversation_elsewhere_and_sub_agents_that_are_trained(task: Task, tmp_path: Path) -> None:
    async with elsewhere(scripted(said)) as there, playing(task, {"main": Rule(False, there)}) as played:
        assert (played.runs[-1].status, played.runs[-1].detail) == ("finished", "Done.")
        record = checked(played, tmp_path)
    assert sorted(record.nodes[row.nodes[0]].role for row in record.rows) == [
        "subagent/Explore",
        "subagent/fork",
        "subagent/general-purpose",
    ]
    assert record.agent["turns"] == 3 == line(record)["roles"]["main"]["calls"]


@asynccontextmanager
async def elsewhere(engine: Any) -> AsyncIterator[SideEndpoint]:
    server = ProxyServer()
    await server.start()
    session = await server.open_session("fixed", char_policy(engine))
    endpoint = SideEndpoint(f"http://127.0.0.1:{server.port}", "fixed", session.secret)
    try:
        yield endpoint
    finally:
        await endpoint.close()
        await server.stop()
