"""This module tests the roles of calls: whose a call is, who answers it, what of it is trained on, and what a record
says of that."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.verdict import Reason
from rollout import SIDE_MODEL
from rollout.agent import AgentRun, Status
from rollout.audit import audit_claims, audit_heard, audit_roles, audit_tokens
from rollout.episode import infra_failure
from rollout.figures import line
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.roles import AGENT_HEADER, Rule, started
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import VERSION, Record, node_records, row_records
from tests.endpoint_kit import StandIn, standing_in
from tests.kit import QueueEngine, char_policy, empty_record

ELSEWHERE = Rule(False, SideEndpoint("http://127.0.0.1:1", "m"))


def request(first: str, system: str = "main", model: str = "policy", more: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": 9000,
        "system": system,
        "messages": [{"role": "user", "content": first}, *more],
    }


def start(kind: str | None, prompt: str) -> str:
    return f"[[Agent {json.dumps({'prompt': prompt} | ({'subagent_type': kind} if kind else {}))}]]"


class Played:
    """A session whose agent is played here, with the agent's events."""

    def __init__(self, rules: Mapping[str, Rule], *said: str) -> None:
        self.session = Session("e", replace(char_policy(QueueEngine(*said)), roles=rules))
        self.events: list[dict[str, Any]] = []

    async def role(self, body: dict[str, Any], agent: str = "") -> str:
        return (await self.session.whose(decode_request(json.dumps(body).encode()), agent)).role

    async def ask(self, body: dict[str, Any], agent: str = "", caller: str | None = None) -> Any:
        wire = decode_request(json.dumps(body).encode())
        whose = await self.session.whose(wire, agent)
        node = await self.session.prepare(wire, False, None, whose.role).reply()
        node.sent = node.delivered = True
        message = {"id": node.reply.id, "content": copy.deepcopy([*node.reply.blocks])}
        self.events.append({"type": "assistant", "message": message, "parent_tool_use_id": caller})
        return node

    def record(self) -> Record:
        session = self.session
        session.disown({event["message"]["id"] for event in self.events})
        assert session.roles is not None
        rows = session.tree.sequences()
        agent = {"status": "finished", "turns": session.turns(), "detail": "", "events": len(self.events)}
        return empty_record(
            version=VERSION,
            nodes=node_records(session.tree, session.foreign),
            rows=row_records(rows),
            events=self.events,
            agent=agent | {"reports": True},
            counters={name: float(count) for name, count in asdict(session.counters).items()},
            roles={name: rule.told for name, rule in session.roles.rules.items()},
            parts=session.talk.parts,
            calls=session.talk.calls,
        )


def findings(record: Record) -> list[str]:
    return [*audit_tokens(record), *audit_heard(record), *audit_claims(record), *audit_roles(record)]


@pytest.mark.parametrize("told", [True, False])
async def test_a_sub_agents_calls_have_the_type_that_started_it(told: bool) -> None:
    """It does not matter whether the client names its sub-agents by a header."""
    played = Played({}, start("Explore", "find  it") + start(None, "mend it"), "found", "mended")
    await played.ask(request("do it"))
    one, two = ("a1", "a2") if told else ("", "")
    assert await played.role(request("<system-reminder>x</system-reminder>\nfind it\n", "exploring"), one) == (
        "subagent/Explore"
    )
    assert await played.role(request("mend it", "working"), two) == "subagent/general-purpose"
    assert await played.role(request("find it", "exploring", SIDE_MODEL), one) == "subagent/Explore"
    # What follows a compaction begins with another message.
    assert await played.role(request("a summary", "exploring"), one) == "subagent/Explore"
    assert await played.role(request("a summary that ends with mend it")) == "main"
    assert await played.role(request("do it", "main, with more tools")) == "main"
    assert await played.role(request("a title", "titles", SIDE_MODEL)) == "side"


async def test_a_fork_inherits_the_conversation_and_is_told_last() -> None:
    played = Played({}, start("fork", "look around"))
    node = await played.ask(request("do it"))
    more = (
        {"role": "assistant", "content": [*node.reply.blocks]},
        {"role": "user", "content": "You: look around."},
    )
    assert await played.role(request("do it", more=more), "a1") == "subagent/fork"
    assert await played.role(request("what nobody has started", "else"), "a2") == "subagent/other"


@pytest.mark.parametrize(
    ("name", "asked", "role"),
    [
        ("task", {"prompt": "p", "subagent_type": "a/b\n"}, "subagent/other"),  # a type that is no name
        ("task", {"prompt": "p", "subagent_type": "explore"}, "subagent/explore"),
        ("task", {"prompt": "p", "subagent_type": ""}, "subagent/general-purpose"),
        ("agent", {"prompt": "p"}, "subagent/general-purpose"),
        ("Agent", {"prompt": 1}, None),
        ("other", {"prompt": "p"}, None),
        ("invoke_agent", {"prompt": "p", "agent_name": "generalist"}, "subagent/generalist"),
        ("multi_agent_v1__spawn_agent", {"message": "p", "agent_type": "explorer"}, "subagent/explorer"),
        ("multi_agent_v1__spawn_agent", {"message": "p"}, "subagent/default"),
        ("multi_agent_v1__send_input", {"message": "p", "target": "x"}, None),
    ],
)
def test_each_agents_call_says_the_type_in_its_own_way(name: str, asked: dict[str, Any], role: str | None) -> None:
    assert started({"type": "tool_use", "name": name, "input": asked}) == (role and (role, "p"))


async def test_what_is_looked_at_for_a_role_is_limited() -> None:
    """It is looked at in the event loop, and anybody in the box can send and start what they like."""
    played = Played({"main": Rule()})
    assert await played.role(request("do it")) == "main"
    starts = [{"type": "tool_use", "name": "Agent", "input": {"prompt": f"look {n}"}} for n in range(300)]
    roles = played.session.roles
    assert roles is not None
    roles.heard(starts)
    assert await played.role(request("x " * (1 << 19) + "look 299", "sub")) == "subagent/general-purpose"
    assert await played.role(request("look 5", "sub of long ago"), "an-id") == "subagent/other"


async def test_a_prompt_may_be_between_tags() -> None:
    asked = json.dumps({"agent_name": "codebase_investigator", "prompt": "find it"})
    played = Played({}, f"[[invoke_agent {asked}]]" * 2)
    await played.ask(request("do it"))
    told = "Look.\n<objective>\nfind it\n</objective>"
    assert await played.role(request(f"{told} Now", "exploring")) == "main"
    assert await played.role(request(told, "looking")) == "subagent/codebase_investigator"
    assert await played.role(request(f"{told}</objective>", "seeing")) == "main"


kinds = st.sampled_from(["Explore", "Plan", "general-purpose"])


@given(st.lists(kinds, min_size=1, max_size=5), st.data())
def test_in_any_order_roles_are_those_that_were_started_and_rows_those_that_are_trained(
    types: list[str], data: st.DataObject
) -> None:
    rules = data.draw(st.dictionaries(st.sampled_from(["main", "subagent", "subagent/Plan"]), st.booleans().map(Rule)))
    order = data.draw(st.permutations(range(len(types))))
    headers = data.draw(st.booleans())

    async def play() -> None:
        calls = "".join(start(kind, f"prompt {number}") for number, kind in enumerate(types))
        played = Played(rules, calls, *["found"] * len(types), "done")
        node = await played.ask(request("do it"))
        callers = [block["id"] for block in node.reply.blocks]
        for number in order:
            body = request(f"prompt {number}", types[number])
            await played.ask(body, f"a{number}" if headers else "", callers[number])
        results = [{"type": "tool_result", "tool_use_id": name, "content": "found"} for name in callers]
        more = ({"role": "assistant", "content": [*node.reply.blocks]}, {"role": "user", "content": results})
        await played.ask(request("do it", more=more))
        record = played.record()
        assert findings(record) == []
        told = [node.role for node in record.nodes if node.logprobs is not None]
        assert told == ["main", *(f"subagent/{types[number]}" for number in order), "main"]
        trained = {n for row in record.rows for n in row.nodes}
        for number, node in enumerate(record.nodes):
            if node.logprobs is not None:
                rule = rules.get(node.role, rules.get("subagent") if node.role != "main" else None)
                assert (number in trained) == (rule is None or rule.train)
        figures = line(record)["roles"]
        assert sum(one["calls"] for one in figures.values()) == len(types) + 2
        assert sum(one["rows"] for one in figures.values()) == len(record.rows)
        assert figures["main"]["turns"] == 2 == record.agent["turns"]

    asyncio.run(play())


@pytest.mark.parametrize("rules", [None, {"main": Rule()}])
async def test_a_reply_that_is_relayed_may_have_reached_the_agent_with_roles_too(rules: Any) -> None:
    session = Session("e", replace(char_policy(QueueEngine("one")), roles=rules))
    session.relayed = True
    wire = decode_request(json.dumps(request("do it")).encode())
    node: Any = await session.prepare(wire, False, None, (await session.whose(wire, "")).role).reply()
    assert session.turns() == 0
    node.sent = True
    assert session.turns() == 1


async def test_foreign_calls_are_told_apart_from_those_that_are_only_served() -> None:
    played = Played({"subagent": Rule(False)}, start("Explore", "find it"), "found", "nobody's", "done")
    node = await played.ask(request("do it"))
    await played.ask(request("find it", "exploring"), "a1", node.reply.blocks[0]["id"])
    await played.ask(request("find it", "pretending"), "a1")
    played.events.pop()
    record = played.record()
    record.verdict["flags"] = ["foreign_calls"]
    assert findings(record) == [] and record.counters["foreign_calls"] == 1
    assert [node.foreign for node in record.nodes if node.logprobs is not None] == [False, False, True]
    for changes, found in (
        ({"foreign": True}, "node 3: foreign is True"),
        ({"role": "main"}, "node 3: its role is main, but the agent reports it as subagent/Explore"),
        ({"trained": True}, "node 3: it is trained on, but subagent/Explore is not"),
        ({"role": ""}, "some of its replies have a role"),
    ):
        damaged = copy.deepcopy(record)
        for name, value in changes.items():
            setattr(damaged.nodes[3], name, value)
        assert any(one.startswith(found) for one in findings(damaged)), (found, findings(damaged))
    record.roles = {"subagent": ELSEWHERE.told}
    assert "node 3: the policy has replied, but http://127.0.0.1:1 answers subagent/Explore" in findings(record)


async def test_an_agent_may_report_a_sub_agents_replies_as_its_own() -> None:
    """OpenHands does not say which call has started the one that asks."""
    played = Played({}, start("explore", "find it"), "found")
    await played.ask(request("do it"))
    await played.ask(request("find it", "exploring"))
    assert any("the agent reports it as main" in one for one in findings(played.record()))
    for event in played.events:
        event["partial"] = True
    assert findings(played.record()) == []


async def test_without_roles_a_record_says_nothing_of_them() -> None:
    session = Session("e", char_policy(QueueEngine("hello")))
    wire = decode_request(json.dumps(request("do it")).encode())
    assert await session.whose(wire, "a1") == ("", None, None)
    node = await session.prepare(wire, False).reply()
    assert node.asked is not None and node.asked.role == "" and session.roles is None
    assert "roles" not in line(empty_record(nodes=node_records(session.tree)))


# --- another endpoint


class Front:
    """A proxy whose sub-agents are answered by a stand-in."""

    def __init__(self, server: ProxyServer, played: Played) -> None:
        self.server, self.played = server, played

    async def post(self, body: dict[str, Any], agent: str = "") -> tuple[int, Any]:
        headers = {"x-api-key": self.played.session.secret, **({AGENT_HEADER: agent} if agent else {})}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{self.server.port}/v1/messages", json=body, headers=headers) as reply,
        ):
            text = await reply.text()
            return reply.status, json.loads(text) if reply.status == 200 else text


async def opened(rules: Mapping[str, Rule], *said: str) -> Front:
    server, played = ProxyServer(), Played(rules, *said)
    await server.start()
    server.sessions[played.session.secret] = played.session
    return Front(server, played)


@pytest.fixture
async def back() -> AsyncIterator[StandIn]:
    async with standing_in(StandIn(lambda text: [{"type": "text", "text": "found elsewhere"}])) as stand_in:
        yield stand_in


async def test_another_endpoint_answers_a_role_and_nothing_of_it_is_trained_on(back: StandIn) -> None:
    there = SideEndpoint(back.url, "fixed", "the key")
    front = await opened({"subagent/Explore": Rule(False, there)}, start("Explore", "find it"), "done")
    status, first = await front.post(request("do it"))
    status, reply = await front.post(request("find it", "exploring"), "a1")
    assert (status, reply["content"][0]["text"], reply["model"]) == (200, "found elsewhere", "fixed")
    session = front.played.session
    (call,) = session.talk.calls
    assert call.role == "subagent/Explore" and len([node for node in session.tree.nodes if node.sampled]) == 1
    for caller, message in ((None, first), (first["content"][-1]["id"], reply)):
        event = {"type": "assistant", "message": {"id": message["id"], "content": message["content"]}}
        front.played.events.append({**event, "parent_tool_use_id": caller})
    record = front.played.record()
    assert findings(record) == [] and record.counters["unknown_reports"] == 0
    assert record.roles == {"subagent/Explore": {"train": False, "endpoint": back.url, "model": "fixed"}}
    assert line(record)["roles"]["subagent/Explore"] == {"calls": 1, "turns": 1, "tokens": 10, "rows": 0}
    assert "the key" not in str(record) and back.keys == {"the key"}
    record.events[-1]["message"]["content"] = [{"type": "text", "text": "other"}]
    assert any(one.startswith("call 0: the agent reports another reply") for one in findings(record))
    record.calls[0].role = "main"
    assert "call 0: another model has replied, but the policy answers main" in findings(record)
    await there.close()
    await front.server.stop()


async def test_a_main_conversation_elsewhere_has_turns_and_its_sub_agents_are_known(back: StandIn) -> None:
    asked = {"prompt": "find it", "subagent_type": "Explore"}
    back.script = lambda text: [{"type": "tool_use", "id": "toolu_1", "name": "Agent", "input": asked}]
    there = SideEndpoint(back.url, "fixed")
    front = await opened({"main": Rule(False, there)}, "found")
    await front.post(request("do it"))
    status, reply = await front.post(request("find it", "exploring"))
    assert status == 200 and reply["content"][0]["text"] == "found"
    session = front.played.session
    assert [node.asked.role for node in session.tree.nodes if node.asked] == ["subagent/Explore"]
    assert session.turns() == 1 and session.counters.calls == 2
    await there.close()
    await front.server.stop()


async def test_a_call_waits_for_the_reply_that_may_have_started_its_conversation(back: StandIn) -> None:
    """A client may start a sub-agent before the whole reply has arrived."""
    played = Played({"main": ELSEWHERE}, "found")
    session, roles = played.session, played.session.roles
    assert roles is not None
    main = await session.whose(decode_request(json.dumps(request("do it")).encode()), "")
    with roles.relaying(main):
        waiting = asyncio.ensure_future(played.role(request("find it", "exploring")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        asked = {"prompt": "find it", "subagent_type": "Explore"}
        roles.answered(main, 200, "", [{"type": "tool_use", "id": "toolu_1", "name": "Agent", "input": asked}])
    assert await waiting == "subagent/Explore"


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_an_endpoint_that_fails_is_an_infrastructure_failure_whatever_the_agent_does(
    back: StandIn, status: int
) -> None:
    there = SideEndpoint(back.url, "fixed")
    front = await opened({"subagent": Rule(False, there)}, start("Explore", "find it"), "done")
    run = AgentRun(Status.FINISHED, 1, "done", [])
    await front.post(request("do it"))
    back.mood = lambda number: (status, {}, "not now") if number < 3 else None
    for _ in range(2):
        assert (await front.post(request("find it", "exploring"), "a1"))[0] == status
    session = front.played.session
    verdict = infra_failure(run, session)
    assert verdict is not None and verdict.reason is Reason.ENGINE_FAILED and verdict.reward is None
    assert verdict.detail.startswith(f"subagent/Explore: {back.url}: status {status}") and "not now" in verdict.detail
    assert (await front.post(request("find it", "exploring"), "a1"))[0] == 200
    assert infra_failure(run, session) is None  # asked again, it has replied
    back.mood = lambda number: (status, {}, "no such field")
    assert (await front.post(request("I am one, too", "exploring"), "a2"))[0] == status  # as any program can say
    assert (infra_failure(run, session) is None) == (status == 400)
    session.roles.failing.clear()
    back.mood = lambda number: (400, {}, "prompt is too long: 9 tokens")
    assert (await front.post(request("find it", "exploring"), "a1"))[0] == 400
    assert infra_failure(run, session) is None
    await there.close()
    await front.server.stop()
    there.url = "http://127.0.0.1:1"
    front = await opened({"subagent": Rule(False, there)}, start("Explore", "find it"))
    await front.post(request("do it"))
    assert (await front.post(request("find it", "exploring"), "a1"))[0] == 529
    assert infra_failure(run, front.played.session) is not None
    await there.close()
    await front.server.stop()
