"""This module tests what every state must be, whatever file it came from: cases that published reports showed, made
small, and random damage to sessions.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.traces.ingest import claude_code, gate, openhands, run, swe_agent
from rl.traces.ingest.gate import Gate
from rl.traces.ingest.states import Message, State
from rollout.proxy.blocks import blocks_of
from tests.export_kit import Play, calls_of, crowd, repair, without_words, write
from tests.ingest_kit import session
from tests.unit.traces.test_ingest import made

SESSION = "11111111-2222-4333-8444-555555555555"


def wrong(state: State) -> str:
    """Say what is wrong with a state: the rules once more, each by itself."""
    system, *talk = state.messages
    spoken = [one for one in talk if one["role"] != "system"]
    if system["role"] != "system" or not spoken or spoken[0]["role"] != "user" or spoken[-1]["role"] != "user":
        return "the ends"
    if any(a["role"] == b["role"] for a, b in itertools.pairwise(spoken)):
        return "roles do not alternate"
    named: list[str] = []
    for said, heard in zip([*spoken, None], [None, *spoken], strict=True):
        asked = [b["id"] for b in blocks_of(heard["content"]) if b["type"] == "tool_use"] if heard else []
        told = [b["tool_use_id"] for b in blocks_of(said["content"]) if b["type"] == "tool_result"] if said else []
        if sorted(asked) != sorted(told) and said is not None:
            return "calls and results"
        named += asked
    own = [b["id"] for b in blocks_of(state.student_action["content"]) if b["type"] == "tool_use"]
    if len({*named, *own}) < len(named) + len(own):
        return "an id twice"
    kinds = {b["type"] for b in blocks_of(state.student_action["content"])}
    return "" if kinds & {"text", "tool_use"} else "a thought alone"


def written(place: Path, lines: list[dict[str, Any]], name: str = SESSION) -> Path:
    (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place / f"{name}.jsonl"


def read(module: Any, path: Path, subagents: bool = True) -> tuple[list[State], dict[str, int]]:
    found, findings, said = made(module, path, path.parent / "states.jsonl", subagents)
    assert said == [] and [wrong(one) for one in found] == [""] * len(found)
    return found, +findings.counts


def texts(state: State) -> list[str]:
    return [b.get("text") or b.get("content") or b["name"] for m in state.messages[1:] for b in blocks_of(m["content"])]


def test_lines_that_are_written_twice_count_once(tmp_path: Path) -> None:
    """A branch, or a resumed input: the same uuid again, and the same message under another one."""
    lines = session(turns=3)
    found, counts = read(claude_code, written(tmp_path, [one for line in lines for one in (line, line)]))
    assert len(found) == 3 and counts["lines that are written twice, left out"] == 6
    assert [len(one.messages) for one in found] == [2, 4, 6]
    again = [{**line, "uuid": f"again-{line['uuid']}"} for line in lines]
    both = [one for pair in zip(lines, again, strict=True) for one in pair]
    found, counts = read(claude_code, written(tmp_path, both))
    # Nothing goes on from the second prompt.
    assert len(found) == 3 and counts["messages that are repeated, left out"] == 5
    assert [len(one.messages) for one in found] == [2, 4, 6]


def test_what_was_typed_meanwhile_is_read(tmp_path: Path) -> None:
    lines = session(turns=2)
    typed = {"type": "attachment", "attachment": {"type": "queued_command", "prompt": "only b.py"}}
    first, second = read(claude_code, written(tmp_path, [*lines[:3], typed, lines[3]]))[0]
    assert texts(second) == ["Fix it.", "Bash", "a result", "only b.py"] and len(texts(first)) == 1


def test_parents_that_were_never_written_are_taken_in_the_files_order(tmp_path: Path) -> None:
    lines = session(turns=3)
    lines[3]["parentUuid"] = "never-written"
    found, counts = read(claude_code, written(tmp_path, lines))
    assert [len(one.messages) for one in found] == [2, 4, 6] and not any(one.exact for one in found)
    assert counts["lines whose parent was never written, in the file's order"] == 1


def test_an_interrupted_thought_is_no_reply(tmp_path: Path) -> None:
    lines = session(turns=1)
    lines[1]["message"]["content"] = [{"type": "thinking", "thinking": "Perhaps"}]
    more = {"role": "user", "content": [{"type": "text", "text": "[Request interrupted by user]"}]}
    lines.append({**lines[0], "uuid": "u", "parentUuid": lines[1]["uuid"], "message": more})
    done = {**lines[1]["message"], "id": "m", "content": [{"type": "text", "text": "Done."}]}
    lines.append({**lines[1], "uuid": "d", "parentUuid": "u", "message": done})
    (one,), counts = read(claude_code, written(tmp_path, lines))
    assert texts(one) == ["Fix it.", "[Request interrupted by user]"]
    assert counts[f"replies left out: {gate.SILENT}"] == 1


def test_sub_agents_beside_their_session_are_read_or_counted(tmp_path: Path) -> None:
    lines, sub = session(turns=2), session(turns=2, name="sub")
    lines[2]["toolUseResult"] = {"agentId": "0f3c9a1b"}
    for line in sub:
        line |= {"isSidechain": True, "agentId": "0f3c9a1b", "sessionId": SESSION}
    written(tmp_path, [{**sub[0], "sessionId": "another"}], "agent-1")
    written(tmp_path, sub, "agent-0f3c9a1b")
    found, _ = read(claude_code, written(tmp_path, lines))
    assert [(one.agent, one.spawned_by) for one in found[2:]] == [(["0f3c9a1b"], "toolu_s_0")] * 2
    found, counts = read(claude_code, tmp_path / f"{SESSION}.jsonl", subagents=False)
    assert len(found) == 2 and counts["sub-agents' files left out"] == 1


def test_a_file_that_never_ends_is_a_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{SESSION}.jsonl")
    with pytest.raises(FileNotFoundError, match="not a plain file"):
        made(claude_code, tmp_path / f"{SESSION}.jsonl", tmp_path / "states.jsonl")


def event(number: int, parent: int | None, kind: str, **more: Any) -> dict[str, Any]:
    return {"id": f"e{number}", "parent_id": None if parent is None else f"e{parent}", "kind": kind, **more}


def text(said: str, role: str) -> dict[str, Any]:
    return {"llm_message": {"role": role, "content": [{"type": "text", "text": said}]}}


def call(number: int, parent: int, command: str) -> dict[str, Any]:
    asked = {"id": f"c{number}", "name": "terminal", "arguments": json.dumps({"command": command})}
    more = {"tool_call": asked, "tool_call_id": asked["id"], "llm_response_id": f"r{number}"}
    return event(number, parent, "ActionEvent", thought=[{"type": "text", "text": command}], **more)


def openhands_states(place: Path, events: list[dict[str, Any]]) -> list[State]:
    (place / "events").mkdir()
    for number, one in enumerate(events):
        (place / "events" / f"event-{number:05d}-{one['id']}.json").write_text(json.dumps(one))
    return read(openhands, place)[0]


def test_events_are_a_tree_and_the_path_to_the_root_counts(tmp_path: Path) -> None:
    seen = {"observation": {"content": [{"type": "text", "text": "gone"}]}}
    found = openhands_states(
        tmp_path,
        [
            event(0, None, "SystemPromptEvent", system_prompt={"text": "SYS"}, tools=[{"name": "terminal"}]),
            event(1, 0, "MessageEvent", source="user", **text("mend it", "user")),
            call(2, 1, "WRONG"),
            event(3, 2, "ObservationEvent", tool_call_id="c2", **seen),
            call(4, 1, "ls"),  # another branch
            event(5, 4, "ObservationEvent", tool_call_id="c4", **seen),
            event(6, 5, "MessageEvent", source="agent", **text("Kept.", "assistant")),
            call(7, 1, "sleep"),  # a third one, in which the program was started anew
            event(8, 1, "AgentErrorEvent", tool_call_id="c7", error="restarted"),
            event(9, 8, "MessageEvent", source="user", **text("go on", "user")),
            event(10, 9, "MessageEvent", source="agent", **text("Again.", "assistant")),
        ],
    )
    assert [texts(one) for one in found] == [
        ["mend it"], ["mend it"], ["mend it", "ls", "terminal", "gone"], ["mend it"], ["mend it", "go on"],
    ]  # fmt: skip


def test_events_that_go_round_in_a_circle_end(tmp_path: Path) -> None:
    said = [event(n, parent, "MessageEvent", source="user", **text(f"{n}", "user")) for n, parent in ((1, 2), (2, 1))]
    last = [event(3, 9, "MessageEvent", source="user", **text("3", "user"))]
    last.append(event(4, 1, "MessageEvent", source="agent", **text("Done.", "assistant")))
    (one,) = openhands_states(tmp_path, [*said, *last])
    assert texts(one) == ["2", "1"]


def test_an_event_whose_id_is_no_text_is_a_line(tmp_path: Path) -> None:
    said = [event(n, None, "MessageEvent", source="user", **text(f"{n}", "user")) for n in (1, 2)]
    said.append(event(3, None, "MessageEvent", source="agent", **text("Done.", "assistant")))
    (tmp_path / "events").mkdir()
    for number, one in enumerate(said):
        (tmp_path / "events" / f"event-{number:05d}-x.json").write_text(json.dumps(one | {"id": [number]}))
    (one,), _, problems = made(openhands, tmp_path, tmp_path / "states.jsonl")
    assert texts(one) == ["1", "2"] and len(problems) == 3


@pytest.mark.parametrize("key", ["query", "messages"])
def test_a_step_of_swe_agent_is_asked_without_its_own_answer(tmp_path: Path, key: str) -> None:
    """Before 1.1 the messages of a step are those of the next step's query."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": "SYS"}, {"role": "user", "content": "mend it"}]
    queries, steps = [list(chat)], []
    for number, command in enumerate(("ls", "cat", "sed")):
        asked = {"id": f"call_{number}", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        chat += [{"role": "assistant", "content": f"I {command}.", "action": command, "tool_calls": [asked]}]
        chat += [{"role": "tool", "content": f"{number}", "tool_call_ids": [asked["id"]]}]
        queries.append(list(chat))
        steps.append({"action": command, "response": f"I {command}.", "thought": f"I {command}."})
    for number, step in enumerate(steps):
        step[key] = queries[number + (key == "messages")]
    (tmp_path / "a.traj").write_text(json.dumps({"trajectory": steps, "history": chat}))
    found, _ = read(swe_agent, tmp_path / "a.traj")
    assert [len(one.messages) for one in found] == [2, 4, 6]


def test_a_trajectory_of_mini_swe_agent_is_read_and_another_refused(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "mend it"}]
    said += [{"role": "assistant", "content": "I look.\n```bash\nls\n```"}, {"role": "exit", "content": "submitted"}]
    found: dict[str, Any] = {"trajectory_format": "mini-swe-agent-1.1", "messages": said, "instance_id": "i"}
    found["info"] = {"config": {"model": {"model_name": "m-1"}}}
    (tmp_path / "a.traj.json").write_text(json.dumps(found))
    (one,), _ = read(swe_agent, tmp_path)
    assert (one.source_model, one.outcome["instance_id"], texts(one)) == ("m-1", "i", ["mend it"])
    (tmp_path / "a.traj.json").write_text(json.dumps(found | {"trajectory_format": "other"}))
    *_, problems = made(swe_agent, tmp_path / "a.traj.json", tmp_path / "states.jsonl")
    assert len(problems) == 1 and "mini-swe-agent-1 is read" in problems[0]


async def test_a_runs_own_episodes_are_states(tmp_path: Path) -> None:
    """Sub-agents if they are wanted, no side calls; an episode that was played before messages were kept is counted."""
    records = [await repair("a"), await crowd("b"), without_words(await repair("c"))]
    place = write(tmp_path / "run", *records)
    found, counts = read(run, place, subagents=False)
    assert [one.state_id for one in found] == ["a/0", "a/1", "b/1", "b/3", "b/4", "b/5", "b/6"]
    assert all(one.exact and one.tools and one.messages[0]["content"] == "Be good." for one in found)
    assert counts["episodes whose messages were not kept, left out"] == 1
    assert counts["replies left out: of a side call"] == counts["replies left out: of a sub-agent"] == 1
    found, _ = read(run, place)
    (sub,) = [one for one in found if one.agent]
    assert sub.spawned_by == next(b["id"] for b in blocks_of(found[2].student_action["content"]) if "id" in b)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_damaged_sessions_give_states_that_keep_the_rules(draw: random.Random, turns: int) -> None:
    import tempfile

    lines = session(turns)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(lines))
        match draw.randrange(6):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(draw.randrange(len(lines) + 1), lines[at])
            case 2:
                lines.insert(at, {**lines[at], "uuid": f"{draw.random()}"})
            case 3:
                lines[at] = {**lines[at], "parentUuid": draw.choice([None, "gone", lines[0].get("uuid")])}
            case 4:
                lines[at] = {**lines[at], "message": {**lines[at]["message"], "content": "Other words."}}
            case _:
                draw.shuffle(lines)
    with tempfile.TemporaryDirectory() as place:
        found, *_ = made(claude_code, written(Path(place), lines), Path(place) / "s.jsonl")
    assert [wrong(one) for one in found] == [""] * len(found)


MESSAGES = st.sampled_from(
    [
        {"role": "user", "content": "go"},
        {"role": "system", "content": "more"},
        {"role": "assistant", "content": "ok"},
        *({"role": "assistant", "content": [{"type": "tool_use", "id": n, "name": "b", "input": {}}]} for n in "ab"),
        *({"role": "user", "content": [{"type": "tool_result", "tool_use_id": n, "content": "r"}]} for n in "ab"),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
    ]
)


@settings(max_examples=500)
@given(st.lists(MESSAGES, max_size=7), MESSAGES.filter(lambda one: one["role"] == "assistant"))
def test_the_gate_opens_for_what_keeps_the_rules_and_for_nothing_else(talk: list[Message], reply: Message) -> None:
    doors, place = Gate(), None
    for message in talk:
        place = doors.after(place, message)
    merged: list[Message] = []
    for message in talk:
        if merged and merged[-1]["role"] == message["role"] == "user":
            both = [*blocks_of(merged[-1]["content"]), *blocks_of(message["content"])]
            merged[-1] = {"role": "user", "content": both}
        else:
            merged.append(message)
    spoken = [one for one in merged if one["role"] != "system"]
    state = State(
        state_id="s", messages=[{"role": "system", "content": ""}, *spoken], student_action=reply, source_model=""
    )
    if any(a["role"] == b["role"] == "user" for a, b in itertools.pairwise(spoken)):
        return  # a system message stands between two of the user's
    assert bool(doors.wrong(place, reply)) is bool(wrong(state))


async def test_a_play_of_the_kit_is_whole(tmp_path: Path) -> None:
    play = Play('[[Bash {"n": 1}]]', "Done.")
    main: list[Any] = [{"role": "user", "content": "go"}]
    (asked,) = calls_of(await play.ask(main))
    play.answer(main, (asked, "r"))
    await play.ask(main)
    found, counts = read(run, write(tmp_path / "run", play.record("a")))
    assert len(found) == 2 and counts["episodes"] == 1
