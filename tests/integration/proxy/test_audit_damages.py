"""The audit finds what was changed in a run that the real Claude Code has played: any field of its records and lines,
what is taken away, exchanged, copied, put into an older version, or made to agree with itself again.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewards.task import Task
from rl.metrics.episodes import EpisodeLog
from rollout import audit
from rollout.episode import run_episode
from rollout.figures import line
from rollout.proxy.calls import CallRecord
from rollout.proxy.server import ProxyServer
from rollout.records import NodeRecord, Record, RecordWriter, RowRecord, pack_floats, record_of
from rollout.records.reading import Reader
from tests.audit_kit import change_ids, redo, sampled
from tests.integration.claude_kit import scripted
from tests.integration.proxy.test_claude_code import repair, setup
from tests.kit import CallReading, CharTokenizer

pytestmark = pytest.mark.claude
HOOK = """python3 -c 'import json, sys; given = json.load(sys.stdin)["tool_input"]
if "command" in given: given["command"] = "echo changed"
print(json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", "updatedInput": given}}))'"""


async def play(task: Task, out: Path, scripts: list[Any], **agent: Any) -> None:
    """Play episodes, and keep them as the trainer's worker does."""
    server = ProxyServer(ping_s=0.3)
    await server.start()
    try:
        writer, log = RecordWriter(out / "episodes", "w"), EpisodeLog(out)
        for number, script in enumerate(scripts):
            made = replace(setup(server, scripted(script), **agent), infra_retries=0)
            episode = await run_episode(made, task, f"train-1-{task.instance_id}-{number}-ab")
            record = record_of(episode, "train", 1, "chars", "kit")
            record.trainer = {"session": f"g_{number}", "engine": "one"}
            writer.append(record)
            log.append(line(record))
        writer.close()
    finally:
        await server.stop()


def wrong(prompt: str) -> str:
    return repair(prompt).replace('new_string": "', 'new_string": "0 * ')


@pytest.fixture(scope="module")
def played(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("played")
    asyncio.run(play(task, out, [repair, wrong, repair]))
    return out


class Run:
    """A run that was read, to be damaged and written again."""

    def __init__(self, source: Path, place: Path) -> None:
        self.place = place
        self.records = list(Reader(source))
        self.lines = [json.loads(text) for text in next(source.glob("episode_metrics/*")).read_text().splitlines()]

    @property
    def first(self) -> Record:
        return self.records[0]

    def write(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        writer = RecordWriter(self.place / "episodes", "w")
        for record in self.records:
            writer.append(record)
        writer.close()
        (self.place / "episode_metrics").mkdir()
        text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in self.lines)
        (self.place / "episode_metrics" / "a.jsonl").write_text(text)

    def again(self, record: Record) -> None:
        """Make all digests, the seal and the line of a record anew, as somebody can who has the project's code."""
        redo(record)
        record.seal = b""
        RecordWriter(self.place / "sealed", f"{record.episode}-{id(record)}").append(record)
        self.lines = [line(record) if one["episode"] == record.episode else one for one in self.lines]

    def findings(self) -> list[str]:
        found = audit.Audit(self.place)
        found.read()
        assert not found.reader.torn
        return found.findings


class Reading(CallReading):
    """Reads no calls where there may be none, as readings of real formats do."""

    def agrees(self, text: str, sent: Sequence[Any], calls: bool) -> bool:
        return (calls or all(block["type"] != "tool_use" for block in sent)) and super().agrees(text, sent, calls)


@pytest.fixture
def run(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(audit, "tokenizer_of", lambda model: CharTokenizer())
    monkeypatch.setattr(audit, "FormatReading", lambda spec, trimmed: Reading())
    return Run(played, tmp_path / "run")


def test_an_honest_run_has_no_findings_also_when_it_is_written_again(played: Path, run: Run) -> None:
    run.write()
    assert run.findings() == []
    run.place = played
    assert run.findings() == []
    assert [one.verdict["outcome"] for one in run.records] == ["resolved", "unresolved", "resolved"]


def other(value: Any) -> Any:
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case bytes():
            return value + b"\0\0\0\0"
        case tuple():
            return (*value, 1)
        case list():
            return [*value, copy.deepcopy(value[-1])] if value else ["x"]
        case dict():
            return {**value, "more": 1.0}
    return "x"


FIELDS = [name for name in Record.__struct_fields__ if name not in ("number", "previous")]
NODE_FIELDS = [name for name in NodeRecord.__struct_fields__ if name != "parent"]


def more_of(name: str, value: Any) -> Any:
    """Return another value of a field of a record."""
    kinds = {"parts": [b"x"], "trainer": {"session": "x"}, "difficulty": "hard", "version": 4}
    kinds |= {"roles": {"main": {"train": True}}, "credit": [1.0, 0.0]}
    return [CallRecord([])] if name == "calls" else kinds.get(name, other(value))


@pytest.mark.parametrize("name", FIELDS)
def test_another_value_of_any_field_of_a_record_is_found(name: str, run: Run) -> None:
    changed = {**msgspec.structs.asdict(run.first), name: more_of(name, getattr(run.first, name))}
    run.records[0] = msgspec.convert(msgspec.to_builtins(changed, builtin_types=(bytes,)), Record)
    run.write()
    assert run.findings()


@pytest.mark.parametrize("name", NODE_FIELDS)
def test_another_value_of_any_field_of_a_reply_is_found(name: str, run: Run) -> None:
    node = sampled(run.first, 0)
    setattr(node, name, other(getattr(node, name)))
    run.write()
    assert run.findings()


@pytest.mark.parametrize("name", RowRecord.__struct_fields__)
def test_another_value_of_any_field_of_a_row_is_found(name: str, run: Run) -> None:
    row = run.first.rows[0]
    setattr(row, name, (7, 7) if name == "versions" else other(getattr(row, name)))
    run.write()
    assert run.findings()


def test_each_figure_of_a_line_that_is_changed_or_missing_is_found(run: Run) -> None:
    """Every field of a line is a figure of the record, those that only the trainer knows included."""
    whole = dict(run.lines[0])
    assert whole.keys() == line(run.first).keys() and {"session", "engine", "record", "wall_s"} <= whole.keys()
    for name, value in whole.items():
        for damaged in ({**whole, name: other(value)}, {k: v for k, v in whole.items() if k != name}):
            run.lines[0] = damaged
            run.write()
            assert run.findings(), name


def event(record: Record, kind: str, number: int = 0) -> dict[str, Any]:
    return [one for one in record.events if one["type"] == kind][number]


def call_of(record: Record) -> dict[str, Any]:
    said = [block for one in record.events if one["type"] == "assistant" for block in one["message"]["content"]]
    return next(block for block in said if block["type"] == "tool_use")


def result_of(record: Record) -> dict[str, Any]:
    return event(record, "user")["message"]["content"][0]


def copied(run: Run, again: bool) -> None:
    """The first episode is there again under another name, with a line of its own."""
    run.records.append(msgspec.structs.replace(copy.deepcopy(run.first), episode="train-1-other-9-cd"))
    run.lines.append({**run.lines[0], "episode": "train-1-other-9-cd"})
    if again:
        run.again(run.records[-1])


def swap(run: Run, field: str) -> None:
    one, two = run.records[0], run.records[1]
    mine, theirs = getattr(one, field), getattr(two, field)
    setattr(one, field, theirs)
    setattr(two, field, mine)


def downgrade(run: Run, version: int, strip: bool, again: bool) -> None:
    for record in run.records if again else run.records[:1]:
        record.version = version
        if strip:
            record.seal, record.trainer = b"", {}
            for node in record.nodes if version < 3 else ():
                node.seal, node.begins, node.says = b"", b"", b""
    if again:
        run.lines = [{k: v for k, v in one.items() if k not in ("record", "session", "engine")} for one in run.lines]


def take_reply(record: Record) -> None:
    """The last reply and what was read before it are gone from the tree, the rows and the events."""
    gone = record.nodes[-1].message_id
    del record.nodes[-2:]
    for row in record.rows:
        row.nodes = [number for number in row.nodes if number < len(record.nodes)]
    record.events[:] = [one for one in record.events if (one.get("message") or {}).get("id") != gone]


def edit(change: Callable[[Record], Any], again: bool = True) -> Callable[[Run], None]:
    """Change the first record; ``again``: and make everything anew, its line too."""

    def done(run: Run) -> None:
        change(run.first)
        if again:
            run.again(run.first)

    return done


def sealed_again(change: Callable[[Record], Any]) -> Callable[[Run], None]:
    """Change the first record and seal it again, but leave its line."""

    def done(run: Run) -> None:
        change(run.first)
        redo(run.first)
        run.first.seal = b""

    return done


DAMAGES: dict[str, Callable[[Run], Any]] = {
    # of a record, with its seal as it was
    "the input of an event": edit(lambda r: call_of(r)["input"].update(file_path="other.py"), again=False),
    "the result in an event": edit(lambda r: result_of(r).update(content="?"), again=False),
    "the last event": edit(lambda r: event(r, "result").update(result="All is well."), again=False),
    "the tools": edit(lambda r: setattr(r.nodes[0], "head", b'["",[]]'), again=False),
    "a message that was read": edit(lambda r: setattr(r.nodes[2], "says", b"[]"), again=False),
    "a prompt's beginning": edit(lambda r: setattr(r.nodes[0], "begins", bytes(32)), again=False),
    "a test's result": edit(lambda r: r.verdict["tests"]["PASS_TO_PASS"].update(success=[]), again=False),
    "the log": edit(lambda r: r.verdict.update(log_tail="fine"), again=False),
    "the flags": edit(lambda r: r.verdict.update(flags=["exit"]), again=False),
    "a phase's time": edit(lambda r: r.timing.update(agent=0.0), again=False),
    "a counter": edit(lambda r: r.counters.update(retries=1.0), again=False),
    "a counter is gone": edit(lambda r: r.counters.pop("engine_errors"), again=False),
    "the patch": edit(lambda r: setattr(r, "patch", b""), again=False),
    "a temperature": edit(lambda r: r.sampling.update(temperature=0.5), again=False),
    "two events are exchanged": edit(lambda r: r.events.insert(1, r.events.pop(2)), again=False),
    "no seal and no version": edit(lambda r: (setattr(r, "seal", b"x" * 32), setattr(r, "version", 5)), again=False),
    # between episodes
    "exchanged: verdicts": lambda run: swap(run, "verdict"),
    "exchanged: patches": lambda run: swap(run, "patch"),
    "exchanged: events": lambda run: swap(run, "events"),
    "exchanged: times": lambda run: swap(run, "timing"),
    "exchanged and sealed again: events": lambda run: (swap(run, "events"), *map(run.again, run.records[:2])),
    "exchanged: names": lambda run: swap(run, "episode"),
    "exchanged and sealed again: names": lambda run: (
        swap(run, "episode"), [setattr(one, "seal", b"") for one in run.records]
    ),
    "a copy under another name": lambda run: copied(run, again=False),
    "a copy under another name, sealed again": lambda run: copied(run, again=True),
    "another episode's replies, sealed again": lambda run: (
        [setattr(run.first, name, getattr(run.records[2], name)) for name in ("events", "agent", "rows", "nodes")],
        run.again(run.first),
    ),
    "the same record twice": lambda run: run.records.append(copy.deepcopy(run.first)),
    # older versions
    "version 4": lambda run: downgrade(run, 4, strip=False, again=False),
    "version 4 without a seal": lambda run: downgrade(run, 4, strip=True, again=False),
    "version 2 without seals": lambda run: downgrade(run, 2, strip=True, again=False),
    "all are version 4, without seals and names in lines": lambda run: downgrade(run, 4, strip=True, again=True),
    "all are version 3 with seals": lambda run: downgrade(run, 3, strip=False, again=True),
    "version 2 with seals": lambda run: downgrade(run, 2, strip=False, again=True),
    # sealed again, but not in the line
    "sealed again: a temperature": sealed_again(lambda r: r.sampling.update(temperature=0.5)),
    "sealed again: a log-probability": sealed_again(
        lambda r: setattr(sampled(r, 0), "logprobs", pack_floats([-9.0] * sampled(r, 0).length))
    ),
    "sealed again: a context": sealed_again(lambda r: change_ids(r.nodes[0], 0, 65)),
    "sealed again: a result": sealed_again(lambda r: result_of(r).update(content="?")),
    # everything made anew, the line too
    "anew: the outcome": edit(lambda r: r.verdict.update(outcome="unresolved")),
    "anew: the reason": edit(lambda r: r.verdict.update(reason="tests_failed")),
    "anew: the reward": edit(lambda r: r.verdict.update(reward=0.5)),
    "anew: no tests": edit(lambda r: r.verdict.update(tests={})),
    "anew: a failed test": edit(lambda r: r.verdict["tests"]["FAIL_TO_PASS"].update(failure=["t"])),
    "anew: an infrastructure failure": edit(lambda r: r.verdict.update(outcome="infra_failure", reason="no_space")),
    "anew: overlong": edit(lambda r: setattr(r, "overlong", True)),
    "anew: the agent's status": edit(lambda r: r.agent.update(status="error")),
    "anew: the agent's answer": edit(lambda r: r.agent.update(detail="All is well.")),
    "anew: turns": edit(lambda r: r.agent.update(turns=40)),
    "anew: attempt": edit(lambda r: setattr(r, "attempt", 1)),
    "anew: a stop reason": edit(lambda r: setattr(sampled(r, 0), "stop_reason", "end_turn")),
    "anew: cut replies": edit(lambda r: r.counters.update(cut_replies=1.0)),
    "anew: calls": edit(lambda r: r.counters.update(calls=1.0)),
    "anew: foreign calls": edit(lambda r: r.counters.update(foreign_calls=1.0)),
    "anew: unread replies": edit(lambda r: r.counters.update(unread_replies=1.0)),
    "anew: a time": edit(lambda r: r.timing.update(agent=1e6)),
    "anew: the input of an event": edit(lambda r: call_of(r)["input"].update(file_path="other.py")),
    "anew: an event is gone": edit(lambda r: r.events.pop(2)),
    "anew: a reply's name": edit(lambda r: setattr(sampled(r, 0), "message_id", sampled(r, 1).message_id)),
    "anew: tools were not allowed": edit(lambda r: setattr(sampled(r, 0), "tools_allowed", False)),
    "anew: a flag of the agent's": edit(lambda r: r.verdict["flags"].append("foreign_calls")),
    # lines and records that are gone or moved
    "a line of a middle record is gone": lambda run: run.lines.pop(1),
    "a line is there twice": lambda run: run.lines.append(run.lines[0]),
    "a line that names no episode": lambda run: run.lines[1].update(episode=None),
    "a line that is no JSON": lambda run: run.lines.__setitem__(1, "{\n"),
    "a line has another figure": lambda run: run.lines[0].update(score=1.0),
    "two lines are exchanged": lambda run: (
        run.lines[0].update(episode=run.lines[1]["episode"]), run.lines[1].update(episode=run.first.episode)
    ),
    "a record is gone": lambda run: run.records.pop(1),
    "the last record is gone": lambda run: run.records.pop(),
}  # fmt: skip

# docs/records.md says why.
UNFINDABLE: dict[str, Callable[[Run], Any]] = {
    "an episode and its line are gone": lambda run: (run.records.pop(1), run.lines.pop(1)),
    "exchanged and anew: verdicts": lambda run: (swap(run, "verdict"), *map(run.again, run.records[:2])),
    "anew: a context": edit(lambda r: change_ids(r.nodes[0], 0, 65)),
    "anew: a result": edit(lambda r: result_of(r).update(content="?")),
    "anew: a temperature": edit(lambda r: r.sampling.update(temperature=0.5)),
    "anew: the last line is gone": lambda run: run.lines.pop(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found(damage: str, run: Run) -> None:
    DAMAGES[damage](run)
    run.write()
    assert run.findings()


@pytest.mark.parametrize("damage", UNFINDABLE)
def test_a_damage_that_cannot_be_found_is_not(damage: str, run: Run) -> None:
    UNFINDABLE[damage](run)
    run.write()
    assert run.findings() == []


def test_ids_with_stray_bytes_cost_one_line_with_file_and_episode(run: Run) -> None:
    sampled(run.first, 0).ids += b"\0"
    run.first.seal = b""
    run.write()  # which seals it
    run.lines[0]["record"] = run.first.seal.hex()
    run.write()
    (found,) = run.findings()
    assert "w.cep" in found and run.first.episode in found and "no whole numbers" in found


async def run_with_hook(task: Task, out: Path, hooks: str) -> list[str]:
    def script(prompt: str) -> str:
        return '[[Bash {"command": "echo sampled"}]]' if prompt.count("assistant: ") == 1 else "Done."

    asked = [{"matcher": "Bash", "hooks": [{"type": "command", "command": hooks}]}]
    await play(task, out, [script], settings=json.dumps({"hooks": {"PreToolUse": asked}}), bare=False)
    (record,) = Reader(out)
    return [*audit.audit_heard(record)]


@pytest.mark.asyncio
async def test_a_command_that_a_hook_has_changed_is_found(task: Task, tmp_path: Path) -> None:
    """Claude Code's events of replies have the input that was sampled; only those of hooks have the one that ran."""
    (found,) = await run_with_hook(task, tmp_path / "a", f"{HOOK}; exit 1")
    assert "by a hook, Bash ran" in found and "echo changed" in found and "echo sampled" in found
    assert await run_with_hook(task, tmp_path / "b", HOOK.replace("echo changed", "echo sampled")) == []
