"""This module tests states: the file, the formats that need no program to be made, and hostile input."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import zstandard

from rl.ingest import main
from rl.traces.ingest import atif, claude_code, openhands, recorded, states, swe_agent
from rl.traces.ingest.lines import LONGEST_LINE, Findings
from rl.traces.ingest.requests import canonical
from rl.traces.ingest.states import State, StatesError, read_states
from rollout.proxy.blocks import blocks_of
from rollout.proxy.chat import chat_request
from rollout.records.reading import Reader
from tests.ingest_kit import session, write_session
from tests.kit import full_at

ROOT = Path(__file__).parents[3]


def made(module: Any, path: Path, out: Path, subagents: bool = False) -> tuple[list[State], Findings, list[str]]:
    said: list[str] = []
    findings = Findings(said.append)
    with states.writing(out) as writer:
        module.ingest(path, writer, findings, subagents)
    findings.counts.update({f"replies left out: {why}": count for why, count in writer.left.items()})
    return list(read_states(out)), findings, said


def flat(message: dict[str, Any]) -> tuple[Any, ...]:
    """A chat message, with its content as one text and its calls' arguments as objects."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    return message["role"], text, calls, message.get("tool_call_id")


def test_openhands_events_give_what_the_sdk_has_sent(tmp_path: Path) -> None:
    """Files that the real SDK has written: parallel calls, an unknown tool, a condensation with a summary."""
    known = json.loads((ROOT / "tests" / "openhands_sdk.json").read_text())
    folder = tmp_path / "c1"
    (folder / "events").mkdir(parents=True)
    (folder / "base_state.json").write_text(json.dumps({"agent": {"llm": {"model": "openai/stand-in"}}}))
    for name, event in known["events"].items():
        (folder / "events" / name).write_text(json.dumps(event))
    (folder / "events" / "event-00099-aaaaaaaa.json").write_text("{broken")
    found, findings, said = made(openhands, tmp_path, tmp_path / "s.jsonl")
    assert len(said) == 1 and "event-00099-aaaaaaaa.json: " in said[0]
    assert findings.counts["compactions"] == 1 and {one.source_model for one in found} == {"openai/stand-in"}
    assert len(found) == len(known["sent"]) == 5
    for state, sent in zip(found, known["sent"], strict=True):
        system, *talk = state.messages
        asked = chat_request({"system": system["content"], "messages": talk, "tools": state.tools}, "m")
        assert [flat(one) for one in asked["messages"]] == [flat(one) for one in sent]
    first = found[0].student_action["content"]
    assert [block["type"] for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert first[0]["thinking"] == "hmm let me see" and "hmm" not in json.dumps(found[1].messages)


def test_old_openhands_output(tmp_path: Path) -> None:
    """By its published schema: actions with and without the model's own response, pairs, a condensation."""

    def action(number: int, reply: str, command: str) -> dict[str, Any]:
        call = {"id": f"t{number}", "function": {"name": "execute_bash", "arguments": json.dumps({"command": command})}}
        message = {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "why"}
        meta = {"model_response": {"id": reply, "model": "m-7", "choices": [{"message": message}]}}
        meta |= {"tool_call_id": f"t{number}", "function_name": "execute_bash"}
        args = {"command": command, "thought": "I look."}
        return {"id": number, "source": "agent", "action": "run", "args": args, "tool_call_metadata": meta}

    def seen(number: int, text: str) -> dict[str, Any]:
        meta = {"tool_call_id": f"t{number - 1}"}
        return {"id": number, "source": "agent", "observation": "run", "content": text, "tool_call_metadata": meta}

    forget = {"forgotten_events_start_id": 2, "forgotten_events_end_id": 3, "summary": "looked", "summary_offset": 2}
    begin = {"content": "SYS", "tools": [{"function": {"name": "x"}}]}
    history = [
        {"id": 0, "source": "agent", "action": "system", "args": begin},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it."}},
        [action(2, "r1", "ls"), seen(3, "a.py")],
        action(4, "r2", "cat a.py"), seen(5, "text"),
        {"id": 6, "source": "agent", "action": "condensation", "args": forget},
        {"id": 7, "source": "agent", "action": "finish", "args": {"thought": "Done.", "outputs": {}}},
    ]  # fmt: skip
    row = {"instance_id": "i-1", "metadata": {"llm_config": {"model": "m"}}, "history": history}
    row |= {"test_result": {"report": {"resolved": True}}}
    file = tmp_path / "output.jsonl"
    file.write_text(json.dumps(row) + "\n" + '{"instance_id": "i-2", "history": 7}\n' + '{"instance_id": "i-3", ')
    found, _, said = made(openhands, file, tmp_path / "s.jsonl")
    assert [line.partition(": ")[0] for line in said] == [str(file)] * 2 and "line 2" in said[0] and "line 3" in said[1]
    assert [one.source_model for one in found] == ["m-7", "m-7", "m"] and found[0].tools[0]["name"] == "x"
    assert found[0].outcome == {"instance_id": "i-1", "resolved": True}
    assert [len(one.messages) for one in found] == [2, 4, 4]
    assert [one["role"] for one in found[2].messages] == ["system", "user", "assistant", "user"]
    assert "looked" in json.dumps(found[2].messages[1]) and "a.py" not in json.dumps(found[2].messages[:2])
    assert found[2].student_action["content"][-1]["name"] == "finish"


def test_old_openhands_output_that_forgets_more_events_than_there_are(tmp_path: Path) -> None:
    forget = {
        "forgotten_events_start_id": 0,
        "forgotten_events_end_id": 10**12,
        "summary": "looked",
        "summary_offset": 10**30,
    }
    history = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "Fix it."}},
        {"id": 1, "source": "agent", "action": "condensation", "args": forget},
        {"id": 2, "source": "agent", "action": "finish", "args": {"thought": "Done."}},
    ]
    file = tmp_path / "output.jsonl"
    file.write_text(json.dumps({"instance_id": "i", "history": history}) + "\n")
    (found,), _, said = made(openhands, file, tmp_path / "s.jsonl")
    assert said == [] and [one["content"] for one in found.messages[1:]] == ["looked"]


def trajectory() -> dict[str, Any]:
    system, user = {"role": "system", "content": "SYS"}, {"role": "user", "content": "Fix it."}
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    said = {"role": "assistant", "content": "I look.", "thought": "I look.", "action": "ls", "tool_calls": [call]}
    heard = {"role": "tool", "content": "a.py", "tool_call_ids": ["c1"]}
    steps = [
        {"action": "ls", "thought": "I look.", "response": "I look.", "observation": "a.py", "query": [system, user]},
        {"action": "", "thought": "", "response": "", "observation": "", "query": []},
        {"action": "submit", "thought": "", "response": "submit", "query": [system, user, said, heard]},
    ]
    config = json.dumps({"agent": {"model": {"name": "m-1"}}})
    return {"trajectory": steps, "history": [system, user, said, heard], "info": {}, "replay_config": config}


@pytest.mark.parametrize("name", ["query", "messages"])
def test_swe_agent_trajectories(tmp_path: Path, name: str) -> None:
    """By its published schema, before version 1.1 and after."""
    found = trajectory()
    for step in found["trajectory"]:
        step[name] = step.pop("query")
    (tmp_path / "a__b-1.traj").write_text(json.dumps(found))
    (tmp_path / "broken.traj").write_text('{"trajectory": [{"response": 3}]}')
    first, last = made(swe_agent, tmp_path, tmp_path / "s.jsonl")[0]
    assert first.student_action["content"][1] == {
        "type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"},
    }  # fmt: skip
    assert [one["role"] for one in last.messages] == ["system", "user", "assistant", "user"]
    assert last.messages[3]["content"][0]["tool_use_id"] == "c1" and last.source_model == "m-1"
    assert last.student_action["content"] == [{"type": "text", "text": "submit"}]


@pytest.mark.parametrize("form", ["traj", "jsonl", "output.jsonl"])
def test_several_attempts_at_a_task_are_several_conversations(tmp_path: Path, form: str) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I do."}]
    event = {"id": 1, "source": "agent", "action": "message", "args": {"content": "I do."}}
    asked = {"id": 0, "source": "user", "action": "message", "args": {"content": "hi"}}
    for name in "ab":
        place = tmp_path / "in" / name / "i" / ("i.traj" if form == "traj" else "output.jsonl")
        place.parent.mkdir(parents=True)
        rows = {"jsonl": {"messages": talk, "instance_id": "i"}, "traj": trajectory()}
        row = rows.get(form, {"instance_id": "i", "history": [asked, event]})
        place.write_text(json.dumps(row) + "\n")
    whole = tmp_path / "in"
    if form == "jsonl":
        whole = tmp_path / "all.jsonl"
        whole.write_text("".join(one.read_text() for one in sorted((tmp_path / "in").rglob("*.jsonl"))))
    found, *_ = made(openhands if form == "output.jsonl" else swe_agent, whole, tmp_path / "s.jsonl")
    assert len({one.conversation for one in found}) == 2 and {one.outcome["instance_id"] for one in found} == {"i"}
    run = recorded.write(tmp_path / "s.jsonl", tmp_path / "run")
    assert len({record.episode for record in Reader(run)}) == 2


TRAJECTORIES = ROOT / "tests" / "trajectories"


def test_contexts_of_swe_agents_own_files_grow(tmp_path: Path) -> None:
    """Steps whose reply the history lacks, in the middle and at the end; a demonstration that is a history only."""
    found, findings, said = made(swe_agent, TRAJECTORIES, tmp_path / "s.jsonl")
    sizes: dict[str, list[int]] = {}
    for state in found:
        sizes.setdefault(Path(state.where.partition(": ")[0]).stem, []).append(len(state.messages))
    assert sizes["function_calling_simple"] == [2, 4, 6, 8, 10]
    assert sizes["6e44b9__sweagenttestrepo-1c2844"] == [2, 4, 6, 8, 10]
    assert sizes["BabyEncryption"] == [*range(2, 18, 2), 18, *range(18, 32, 2)]
    assert said == [] and findings.counts["contexts shorter than one before"] == 0
    assert findings.counts["replies that the history lacks, without the calls that they may have had"] == 2
    calls = [one.student_action["content"][-1]["name"] for one in found if "simple" in one.where]
    assert len(calls) == 5 and calls[-1] == "submit"


def test_contexts_that_shrink_are_counted(tmp_path: Path) -> None:
    found = trajectory()
    found["trajectory"].append({**found["trajectory"][0], "response": "again", "action": "cat"})
    (tmp_path / "a__b-1.traj").write_text(json.dumps(found))
    assert made(swe_agent, tmp_path, tmp_path / "s.jsonl")[1].counts["contexts shorter than one before"] == 1


def test_what_swe_agent_says_itself_is_no_reply(tmp_path: Path) -> None:
    """At a limit of costs it asks nobody; a reply whose text in the history was edited keeps its call."""
    known = json.loads((TRAJECTORIES / "6e44b9__sweagenttestrepo-1c2844.traj").read_text())
    known["trajectory"][1]["response"] = known["trajectory"][1]["thought"] = "other words"
    end = {"action": "", "thought": "Exit due to cost limit", "response": "Exit due to cost limit", "query": [{}]}
    known["trajectory"].append(end)
    (tmp_path / "a__b-1.traj").write_text(json.dumps(known))
    found, findings, said = made(swe_agent, tmp_path, tmp_path / "s.jsonl")
    assert len(found) == 5 and said == [] and findings.counts["steps without a reply, left out"] == 1
    assert found[1].student_action["content"][-1]["name"] == "open"


def test_ids_that_stand_twice_in_a_trajectory_are_told_apart(tmp_path: Path) -> None:
    """People put demonstrations together out of others; mini-swe-agent's files were lists before 1.0."""
    found = trajectory()
    system, user, said, heard = found["history"]
    talk = [system, user, said, heard, said, {**heard, "content": "b.py"}, {"role": "assistant", "content": "Done."}]
    (tmp_path / "a__b-1.traj").write_text(json.dumps({"history": talk}))
    (tmp_path / "a__b-2.traj.json").write_text(json.dumps(talk))
    found, findings, told = made(swe_agent, tmp_path, tmp_path / "s.jsonl")
    assert told == [] and findings.counts["trajectories"] == 2
    for one in (found[2], found[5]):
        blocks = [block for message in one.messages[2:] for block in message["content"] if block["type"] != "text"]
        names = [block.get("id") or block["tool_use_id"] for block in blocks]
        assert names == ["c1", "c1", "c1'", "c1'"] and [b.get("content") for b in blocks[1::2]] == ["a.py", "b.py"]


def test_how_much_was_read_is_shown(tmp_path: Path) -> None:
    text = "x" * (1 << 19)
    write_session(tmp_path / "a.jsonl", turns=6, text=text)
    trajectories = tmp_path / "t"
    trajectories.mkdir()
    (trajectories / "a__b-1.traj").write_text(json.dumps(trajectory() | {"environment": text * 5}))
    for module, path in ((claude_code, tmp_path / "a.jsonl"), (swe_agent, trajectories)):
        shown: list[int] = []
        findings = Findings(lambda text: None, shown.append)
        with states.writing(tmp_path / "s.jsonl") as writer:
            module.ingest(path, writer, findings, False)
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        assert shown[-1] == size >> 20 >= 2 and shown == sorted(set(shown))


def test_states_without_a_models_name_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = TRAJECTORIES / "BabyEncryption.traj"
    assert main(["swe-agent", str(file), "--out", str(tmp_path / "s.jsonl")]) == 0
    assert "16  states whose model is not named: rl.teachers can't leave out its family" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_swe_smith_rows(tmp_path: Path, suffix: str) -> None:
    said = "I look.\n<function=bash>\n<parameter=command>ls</parameter>\n</function>"
    roles = ("system", "user", "assistant", "user", "assistant")
    talk = [{"role": r, "content": said if r == "assistant" else r} for r in roles]
    row = {"messages": json.dumps(talk), "instance_id": "i", "resolved": False, "model": "m", "traj_id": "t"}
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps([row]) if suffix == ".json" else json.dumps(row) + "\n")
    found, *_ = made(swe_agent, file, tmp_path / "s.jsonl.zst")
    assert [(one.state_id, len(one.messages)) for one in found] == [("t/1", 2), ("t/3", 4)]
    assert found[0].outcome == {"instance_id": "i", "resolved": False}


@pytest.mark.parametrize(
    ("told", "known"), [("False", False), ("true", True), (1, True), ("no idea", None), ([], None)]
)
def test_whether_it_was_resolved_may_be_a_text(tmp_path: Path, told: object, known: bool | None) -> None:
    talk = [{"role": role, "content": role} for role in ("user", "assistant")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk, "resolved": told, "traj_id": "t"}) + "\n")
    (one,), *_ = made(swe_agent, tmp_path / "rows.jsonl", tmp_path / "s.jsonl")
    assert one.outcome == ({} if known is None else {"resolved": known})


def test_atif(tmp_path: Path) -> None:
    """By its schema (the package atif 1.8.0 accepts this document)."""
    sub = {
        "schema_version": "ATIF-v1.8", "trajectory_id": "sub-1",
        "agent": {"name": "a", "version": "1", "model_name": "small"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "SUB"},
            {"step_id": 2, "source": "agent", "message": "Found."},
        ],
    }  # fmt: skip
    reference = {"source_call_id": "c1", "content": "ok", "subagent_trajectory_ref": [{"trajectory_id": "sub-1"}]}
    call = {"tool_call_id": "c1", "function_name": "Agent", "arguments": {"prompt": "SUB"}}
    definition = {"type": "function", "function": {"name": "Agent", "parameters": {"type": "object"}}}
    document = {
        "schema_version": "ATIF-v1.8", "session_id": "s", "subagent_trajectories": [sub],
        "agent": {"name": "a", "version": "1", "model_name": "large", "tool_definitions": [definition]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "SYS"},
            {"step_id": 2, "source": "user", "message": "Go."},
            {"step_id": 3, "source": "agent", "message": "copied", "is_copied_context": True},
            {"step_id": 4, "source": "user", "message": "Go on."},
            {"step_id": 5, "source": "agent", "message": "I ask.", "reasoning_content": "hm", "tool_calls": [call],
             "observation": {"results": [reference]}},
            {"step_id": 6, "source": "agent", "message": "Done.", "model_name": "other"},
        ],
    }  # fmt: skip
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.json").write_text(json.dumps(document))
    (tmp_path / "t" / "b.json").write_text(json.dumps(document | {"schema_version": "ATIF-v9.0"}))
    alone, findings, said = made(atif, tmp_path / "t", tmp_path / "s.jsonl")
    assert len(said) == 1 and "ATIF-v9.0" in said[0] and findings.counts["sub-agents left out"] == 1
    assert [(one.source_model, len(one.messages)) for one in alone] == [("large", 4), ("other", 6)]
    assert [block["type"] for block in alone[0].student_action["content"]] == ["thinking", "text", "tool_use"]
    assert alone[1].messages[0]["content"] == "SYS" and alone[1].tools[0]["name"] == "Agent"
    found, *_ = made(atif, tmp_path / "t" / "a.json", tmp_path / "s.jsonl", subagents=True)
    assert [(one.agent, one.spawned_by) for one in found] == [([], None), ([], None), (["sub-1"], "c1")]


def test_a_sub_agents_file_is_not_read_from_anywhere(tmp_path: Path) -> None:
    place = {"source_call_id": None, "subagent_trajectory_ref": [{"trajectory_path": "../secret.json"}]}
    asked = {"step_id": 1, "source": "user", "message": "Go."}
    step = {"step_id": 2, "source": "agent", "message": "x", "observation": {"results": [place]}}
    document = {"schema_version": "ATIF-v1.7", "agent": {"name": "a", "version": "1"}, "steps": [asked, step]}
    (tmp_path / "t").mkdir()
    for name in ("t/a.json", "secret.json"):
        (tmp_path / name).write_text(json.dumps(document))
    found, _, said = made(atif, tmp_path / "t", tmp_path / "s.jsonl", subagents=True)
    assert len(found) == 1 and "outside of its folder" in said[0]


def test_messages_are_written_once_and_parquet_has_all(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "s.jsonl"
    write_session(source, turns=40, text="x" * 10_000)
    for name in (out, tmp_path / "s.jsonl.zst", tmp_path / "s.parquet"):
        assert main(["claude-code", str(source), "--out", str(name)]) == 0
    found = list(read_states(out))
    assert len(found) == 40 and len(found[-1].messages) == 80
    assert found == list(read_states(tmp_path / "s.jsonl.zst"))
    assert out.stat().st_size < 1.5 * source.stat().st_size
    rows = pyarrow.parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert [row["state_id"] for row in rows] == [one.state_id for one in found]
    assert [len(row["messages"]) for row in rows] == [len(one.messages) for one in found]
    assert json.loads(rows[7]["student_action"]) == found[7].student_action
    assert (tmp_path / "s.parquet").stat().st_size < source.stat().st_size
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


DAMAGES = {
    "cut": (lambda good: json.dumps(good)[:50], "JSON is malformed"),
    "a list": (lambda good: "[1, 2]", "Expected `object`"),
    "a number for a content": (lambda good: json.dumps(good | {"message": {"content": 7}}), "without text or content"),
    "a block without type": (lambda good: json.dumps(good | {"message": {"content": [{"a": 1}]}}), "without text or"),
    "a wrong type": (lambda good: json.dumps(good | {"uuid": 7}), "$.uuid"),
    "too deep": (lambda good: '{"type": ' + "[" * 100_000, "line 4"),
    "no text": (lambda good: "\0\xff", "line 4"),
    "no JSON": (lambda good: '{"type": "user", "n": NaN, "t": "\\ud800"}', "NaN"),
    "too long": (lambda good: "x" * (LONGEST_LINE + 10), "longer than 64 MiB"),
    "another version": (lambda good: json.dumps(good | {"version": "9.0.1"}), "Claude Code 9.0.1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_one_line_and_the_rest_is_read(tmp_path: Path, damage: str) -> None:
    """Replies that follow it are left out, because nobody knows what they have read."""
    lines = session(turns=4)
    make, words = DAMAGES[damage]
    texts = [*map(json.dumps, lines[:3]), make(lines[3]), *map(json.dumps, [*lines[4:], *session(3, name="t")])]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(texts) + "\n", encoding="latin-1")
    found, findings, said = made(claude_code, file, tmp_path / "s.jsonl")
    assert len(said) == 1 and words in said[0] and f"{file}: line 4" in said[0] and "\n" not in said[0], said
    names = [f"{state.conversation}/{len(state.messages)}" for state in found]
    kept = ["a/2", "a/4", "a/6", "a/8"] if damage == "another version" else ["a/2"]
    assert names == [*kept, "a/2", "a/4", "a/6"]
    assert findings.counts["replies left out: its history has a gap"] == 4 - len(kept) - (len(kept) < 4)


def test_a_file_that_breaks_off_and_lone_surrogates(tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in session(turns=3, text="half a \ud83d face")]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines) + "\n" + lines[0][:40])
    found, _, said = made(claude_code, file, tmp_path / "s.jsonl")
    assert len(found) == 3 and len(said) == 1 and "the file breaks off in this line" in said[0]
    assert "half a \ufffd face" in json.dumps(found[-1].messages, ensure_ascii=False)


def test_random_damage_never_ends_an_ingest(tmp_path: Path) -> None:
    data = "".join(json.dumps(line) + "\n" for line in session(turns=6)).encode()
    file, draw = tmp_path / "a.jsonl", random.Random(7)
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 20)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randint(0, 30)] = bytes(draw.choices(range(256), k=draw.randint(0, 5)))
        file.write_bytes(changed)
        made(claude_code, file, tmp_path / "s.jsonl")  # nothing is raised, and what was written can be read


def test_replies_are_grouped_and_branches_share_their_history(tmp_path: Path) -> None:
    """A rewound conversation: two replies to two prompts that follow the same message."""
    lines = session(turns=2)
    lines[3]["message"]["content"] = [{"type": "text", "text": "Done."}]
    branch = [
        {**lines[number], "uuid": f"{name}{number}", "parentUuid": parent, "message": message}
        for name, parent in (("more", lines[3]["uuid"]), ("instead", lines[3]["uuid"]))
        for number, parent, message in (
            (2, parent, {"role": "user", "content": name}),
            (3, f"{name}2", {**lines[3]["message"], "id": name}),
        )
    ]
    synthetic = {
        **lines[3],
        "uuid": "e",
        "parentUuid": "instead3",
        "message": {**lines[3]["message"], "model": "<synthetic>"},
    }
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *branch, synthetic]))
    found, findings, _ = made(claude_code, file, tmp_path / "s.jsonl")
    assert [len(one.messages) for one in found] == [2, 4, 6, 6] and found[3].messages[-1]["content"] == "instead"
    assert findings.counts["messages of Claude Code in a model's place, left out"] == 1
    copy = tmp_path / "copy.jsonl"  # older versions copied a session when it was resumed
    copy.write_bytes(file.read_bytes())
    assert main(["claude-code", str(file), str(copy), "--out", str(tmp_path / "s.jsonl")]) == 0
    assert len(list(read_states(tmp_path / "s.jsonl"))) == 4


@pytest.mark.parametrize(
    ("path", "exact"),
    [
        (["tools", 0], True), (["messages", 2, "content", 0], True), (["messages", 9, "content", 0], False),
        (["system"], False), (["messages"], False), ([], False), (["tools", 0, "name"], False),
    ],
)  # fmt: skip
def test_a_request_is_proven_with_the_marks_that_it_had(tmp_path: Path, path: list[Any], exact: bool) -> None:
    """A request whose notes hold something else leaves its reply a state, but an unproven one."""
    lines = session(turns=2)
    shape = {"system": [{"type": "text", "text": "SYS"}], "tools": [{"name": "Bash", "input_schema": {}}]}
    talk = [{"role": one["type"], "content": blocks_of(one["message"]["content"])} for one in lines[:3]]
    asked = json.loads(json.dumps({"messages": talk, "max_tokens": 10, **shape}))
    at: Any = asked
    for step in path if exact else ():
        at = at[step]
    if exact:
        at["cache_control"] = {"type": "ephemeral"}
    name, *digests, whole = (hashlib.sha256(canonical(one)).hexdigest() for one in (shape, *talk, asked))
    noted = {"shapeHash": name, "params": {"max_tokens": 10}, "requestDigest": whole}
    noted["cacheControl"] = [{"path": path, "value": {"type": "ephemeral"}}]
    first = {"type": "api-request", "id": "q1", "tail": digests[:1], **noted}
    second = {"type": "api-request", "id": "q2", "base": "q1", "keep": 1, "tail": digests[1:], **noted}
    asks = [{"type": "api-request-shape", "shape": shape, "shapeHash": name}, first, second]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in [*lines[:3], *asks, {**lines[3], "requestRef": "q2"}]))
    found, _, said = made(claude_code, file, tmp_path / "s.jsonl")
    assert said == [] and [one.exact for one in found] == [False, exact]
    assert [one["role"] for one in found[1].messages] == ["system", "user", "assistant", "user"]
    assert found[1].messages[0]["content"] == shape["system"] and found[1].tools == shape["tools"]


def test_only_session_files_of_a_folder_are_read(tmp_path: Path) -> None:
    """A collection's traces have Claude Code's event stream beside them, whose lines look alike."""
    events = [{**line, "session_id": "s", "parentUuid": None} for line in session(turns=3)[1:]]
    stream, own = tmp_path / "stream.jsonl", tmp_path / "sessions" / "11111111-2222-4333-8444-555555555555.jsonl"
    stream.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "parentUuid"}) + "\n" for one in events))
    own.parent.mkdir()
    write_session(own, turns=3, text="r")
    found, findings, _ = made(claude_code, tmp_path, tmp_path / "s.jsonl")
    assert len(found) == 3 and findings.counts["session files"] == 1
    found, findings, _ = made(claude_code, stream, tmp_path / "s.jsonl")
    assert found == [] and findings.counts["replies left out: its history has a gap"] == 3
    own.rename(own.with_name("mine.jsonl"))
    assert "no session file in it" in made(claude_code, tmp_path, tmp_path / "s.jsonl")[2][0]


def test_what_is_no_states_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.jsonl"
    for text in ("", "{}", '{"type": "states", "schema_version": 99}\n', "\xff"):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(StatesError, match="line 1"):
            list(read_states(file))
    packed = tmp_path / "s.jsonl.zst"
    packed.write_bytes(zstandard.compress(b'{"type": "states", "schema_version": 1}\n')[:-4] + b"oops")
    with pytest.raises(StatesError):
        list(read_states(packed))
    assert main(["claude-code", str(tmp_path / "none"), "--out", str(file)]) == 1
    assert main(["claude-code", str(file), "--out", str(tmp_path / "s.csv")]) == 2
    assert main(["pdf", "x"]) == 2
    assert "none: no such file" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    write_session(source, turns=50, text="y" * 5_000)
    command = [sys.executable, "-m", "rl.ingest", "claude-code", str(source), "--out", str(tmp_path / "s.jsonl")]
    done = subprocess.run(full_at(100_000, command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("ingest: ") and len(done.stderr.splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
