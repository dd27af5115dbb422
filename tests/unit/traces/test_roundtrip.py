"""This module brings episodes through other programs' formats and back: the same replies, texts and calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.export import main as export
from rl.ingest import main as ingest
from rl.traces.ingest import recorded
from rl.traces.ingest.agreement import COMMAND, calls_of
from rl.traces.ingest.states import Message, State, read_states
from rl.view.index import Index
from tests.export_kit import Play, crowd, lines, repair, write
from tests.export_kit import calls_of as ids_of


async def talking() -> Any:
    """An episode of ten calls, of which each has other arguments."""
    play = Play(*[f'I try {n}. [[Bash {{"command": "ls {n}"}}]]' for n in range(10)], "Done.")
    main: list[Any] = [{"role": "user", "content": "fix it"}]
    for n in range(10):
        (call,) = ids_of(await play.ask(main))
        play.answer(main, (call, f"result {n}"))
    await play.ask(main)
    return play.record("c")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = [asyncio.run(one) for one in (repair("a"), repair("b", "Gave up.", 0.0), talking(), crowd("d"))]
    return write(tmp_path / "run", *(msgspec.structs.replace(one, task=f"t-{one.episode}") for one in made))


def said(action: Message, spelled: bool) -> tuple[str, list[tuple[str, bytes]]]:
    """A reply's text, without what spells a call, and its calls."""
    content: Any = action["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "\n".join(one["text"] for one in blocks if one["type"] == "text")
    calls = calls_of(action, spelled) or []
    for mark in ("<function=", "```") if calls else ():
        text = text.partition(mark)[0]
    text = text.rpartition("</think>")[2]
    # Between ticks a command of Bash is what the format can say.
    return text.strip(), [("Bash", value) if name == COMMAND else (name, value) for name, value in calls]


def states(*arguments: str) -> list[State]:
    out = Path(arguments[-1]).parent / f"{arguments[0]}-{Path(arguments[-1]).name}.jsonl"
    assert ingest([*arguments, "--out", str(out), "--subagents"]) == 0
    return list(read_states(out))


def spelled(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row of `messages` as SWE-smith's rows of the styles tool, ticks and (on its hub) one JSON text."""
    made: list[dict[str, Any]] = []
    for one in row["messages"]:
        message = {"role": one["role"], "content": one["content"]}
        if kind == "ticks":
            message["role"] = "user" if one["role"] == "tool" else one["role"]
            for call in one.get("tool_calls", ()):
                message["content"] += f"\n\n```\n{call['function']['arguments'].get('command', 'agent')}\n```"
        else:
            message |= {key: one[key] for key in ("tool_call_id",) if key in one}
            if one.get("tool_calls"):
                message["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
                    for c in one["tool_calls"]
                ]
        made.append(message)
    whole: Any = json.dumps(made) if kind == "text" else made
    return {"messages": whole, "traj_id": row["episode"] + row["thread"], "resolved": row["resolved"], "model": "m"}


@pytest.mark.parametrize("kind", ["atif", "xml", "ticks", "tool", "text"])
def test_replies_texts_and_calls_come_back(run: Path, tmp_path: Path, kind: str) -> None:
    """Rows of SWE-smith's are whole conversations, in which a reply that is kept behind a compaction stands again."""
    out = tmp_path / "out"
    assert export([{"atif": "atif", "xml": "swesmith-xml"}.get(kind, "messages"), str(run), "--out", str(out)]) == 0
    place = {"atif": out, "xml": out / "ft_xml.jsonl"}.get(kind, tmp_path / "rows.jsonl")
    if place.name == "rows.jsonl":
        rows = [spelled(row, kind) for row in lines(out / "messages.jsonl")]
        place.write_text("".join(json.dumps(row | {"traj_id": str(n)}) + "\n" for n, row in enumerate(rows)))
    base, back = states("run", str(run)), states("atif" if kind == "atif" else "swe-agent", str(place))
    kept = [said(one.student_action, kind in ("xml", "ticks")) for one in back]
    if kind != "atif":
        kept.remove(("So far.", []))
    mine = [said(one.student_action, False) for one in base]
    if kind == "ticks":  # there are no other tools
        mine, kept = ([one for one in told if b"agent" not in str(one).encode().lower()] for told in (mine, kept))
    assert sorted(kept) == sorted(mine) and len(mine) > 15
    assert len(back) == len(base) + (kind != "atif")


def test_what_was_ingested_is_exported_and_seen_as_an_episode(run: Path, tmp_path: Path) -> None:
    """Record, rows, states, messages: the same conversations, with the verdicts that the rows tell."""
    assert export(["messages", str(run), "--out", str(tmp_path / "messages"), "--threads", "main"]) == 0
    mine = lines(tmp_path / "messages" / "messages.jsonl")
    rows = [spelled(row, "tool") | {"traj_id": f"{n}", "instance_id": row["task"]} for n, row in enumerate(mine)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ingest(["swe-agent", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "s.jsonl.zst")]) == 0
    assert export(["messages", str(tmp_path / "s.jsonl.zst"), "--out", str(tmp_path / "again")]) == 0
    again = lines(tmp_path / "again" / "messages.jsonl")

    def plain(row: dict[str, Any]) -> Any:
        return [(m["role"], m["content"], [c["function"] for c in m.get("tool_calls", ())]) for m in row["messages"]]

    assert list(map(plain, again)) == list(map(plain, mine))
    assert [row["resolved"] for row in again] == [row["resolved"] for row in mine]
    assert [row["task"] for row in again] == [row["task"] for row in mine]
    index = Index(recorded.write(tmp_path / "s.jsonl.zst", tmp_path / "seen"))
    index.extend()
    assert len(index.entries) == 5 and not index.damage and all(not one.facts["findings"] for one in index.entries)


def test_a_file_that_has_no_states_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert export(["messages", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "out").exists()
