"""This program counts what every program reads of every kind of source: replies, calls, texts and ids.

    .venv/bin/python -m tests.trace_table [--episodes 60] [--run RUN]...

The real Claude Code plays episodes whose replies come from stubs that use ids as some servers do: one for all, three
digits, or none. Their records, and what other formats make of them, are read by every program; a cell says how many
replies it has found, their calls, texts and different ids. The exit status is 1 if a cell differs from what was said,
in numbers or in a word. --run: one more column, of a run that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from rl.data.choice import ChoiceRules, choose
from rl.export import main as export
from rl.ingest import main as ingest
from rl.quickstart.tasks import make_tasks
from rl.traces.collect.dataset import rows
from rl.traces.collect.spans import spans_of
from rl.traces.ingest import recorded
from rl.traces.ingest.agreement import COMMAND, calls_of
from rl.traces.ingest.states import read_states
from rl.view.turns import read
from rollout.proxy.chat import chat_request
from rollout.proxy.replies import Reply, reply_events, reply_json, sse
from rollout.trace import Trace, trace
from tests.integration.programs_kit import AGENT, gold, start
from tests.kit import CALL

IDS = ("one id for all", "three digits", "no ids")
SWESMITH = ("xml", "tool", "ticks", "text")


class Told(NamedTuple):
    """A reply as a program has read it: its id, its text, and its calls by name and normalized arguments."""

    id: str
    text: str
    calls: tuple[tuple[str, bytes], ...]


class Cell(NamedTuple):
    """Replies, their calls, those that have a text, and different ids."""

    replies: int
    calls: int
    texts: int
    ids: int

    @classmethod
    def of(cls, told: Iterable[Told]) -> Cell:
        all_ = list(told)
        return cls(
            len(all_), sum(len(o.calls) for o in all_), sum(bool(o.text) for o in all_), len({o.id for o in all_})
        )


# --- the stubs


class Stub:
    """An endpoint of chat completions and of the Messages API that solves tasks, with ids of a kind (IDS)."""

    def __init__(self, kind: str) -> None:
        self.kind, self.count = kind, 0

    def named(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Add the id to a reply or a call."""
        self.count += 1
        name = {IDS[0]: "x", IDS[1]: f"{self.count % 1000:03}", IDS[2]: None}[self.kind]
        return whole | ({} if name is None else {"id": name})

    async def completions(self, request: web.Request) -> web.Response:
        asked = await request.json()
        text = solve(asked)
        calls = [
            self.named({"type": "function", "function": {"name": name, "arguments": arguments}})
            for name, arguments in CALL.findall(text)
        ]
        message = {"role": "assistant", "content": CALL.sub("", text) or None, "reasoning_content": "so\n\n  so"}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response(self.named({"model": "m", "choices": [choice], "usage": usage}))

    async def messages(self, request: web.Request) -> web.Response:
        """Answer with an id of a kind. Claude Code needs calls' own ids: without them it takes one result for all."""
        asked = await request.json()
        text = solve(chat_request(asked, "m"))
        said: list[dict[str, Any]] = [{"type": "text", "text": plain}] if (plain := CALL.sub("", text)) else []
        for name, given in CALL.findall(text):
            self.count += 1
            said.append({"type": "tool_use", "id": f"toolu_{self.count}", "name": name, "input": json.loads(given)})
        reply = Reply("", tuple(said), "tool_use" if len(said) > 1 else "end_turn", 9, 9)
        whole = {key: value for key, value in reply_json(reply, asked["model"]).items() if key != "id"}
        whole = self.named(whole)
        if not asked.get("stream"):
            return web.json_response(whole)
        start = sse("message_start", {"message": whole | {"content": [], "stop_reason": None}})
        return web.Response(body=start + reply_events(reply), content_type="text/event-stream")


def solve(body: dict[str, Any]) -> str:
    """The reply to a chat completion's request: three turns, of which the first two have a call."""
    lines = [f"{one['role']}: {one['content']}" for one in body["messages"]]
    reply = gold("\n".join(lines) + "\nassistant: ")
    return f"I go on:\n\n    {reply}" if CALL.search(reply) else reply


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/messages", stub.messages)
    app.router.add_post("/v1/chat/completions", stub.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def collect(kind: str, back_end: str, tasks: Path, out: Path) -> Path:
    """Play the tasks with the real Claude Code against a stub; return the collection."""
    async with serving(Stub(kind)) as url:
        url += "/v1" if back_end == "openai" else ""
        what = [back_end, f"endpoint={url}", "models.high=m", "models.low=m", f"data={tasks}", f"out={out}", *AGENT]
        process = start(*what, program="rollout.collect", ANTHROPIC_API_KEY="k", OPENAI_API_KEY="k")
        said, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, said
    return out


# --- what programs read


def traces(run: Path) -> Iterator[Trace]:
    for entry in choose([run], ChoiceRules(), lambda done, total: None).entries:
        found = trace(entry.record())
        if not found.silent:  # which all programs refuse, in a line
            yield found


def said(name: Any, content: Any, spelled: bool = False) -> Told:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    calls = calls_of({"role": "assistant", "content": blocks}, spelled)
    text = "\n".join(one["text"] for one in blocks if one["type"] == "text")
    for mark in ("<function=", "```") if spelled else ():
        text = text.partition(mark)[0]
    return Told(str(name), text.rpartition("</think>")[2].strip(), tuple(calls or ()))


def of_trace(run: Path) -> Iterator[Told]:
    for one in traces(run):
        yield from (
            said(f"{one.record.episode}/{point.number}", point.blocks, not point.tools)
            for point in one.delivered
            if not point.side
        )


def of_view(run: Path) -> Iterator[Told]:
    for one in traces(run):
        spelled = not any(point.tools for point in one.points)
        for turn in read(one.record).turns:
            if turn.kind != "side" and turn.untrained != "lost":
                blocks: list[dict[str, Any]] = [
                    {"type": "tool_use", "name": part.name, "input": part.arguments}
                    if part.kind == "call"
                    else {"type": part.kind, "text": part.text}
                    for part in turn.parts
                ]
                yield said(f"{one.record.episode}/{turn.number}", blocks, spelled)


def _json(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, list) else text


def of_dataset(run: Path) -> Iterator[Told]:
    for one in traces(run):
        for row in rows(one, 0, None):
            if row["slot"] == "high":
                name = f"{row['episode']}/{row['turn']}"
                yield said(name, _json(row["messages"][-1]["content"]), row["tools"] == "[]")


def of_spans(run: Path) -> Iterator[Told]:
    for one in traces(run):
        spelled = not any(point.tools for point in one.points)
        for span in spans_of(one):
            about = span["attributes"]
            if span["name"] == "openai.chat.completion" and not about["claude_code_rl.side_call"]:
                yield said(about["gen_ai.response.id"], _json(about["gen_ai.completion.0.content"]), spelled)


def of_states(source: Path) -> Iterator[Told]:
    for state in read_states(source):
        yield said(state.state_id, state.student_action["content"], not state.tools)


def of_messages(source: Path, out: Path) -> Iterator[Told]:
    """The replies of the export `messages`, without those that another row has."""
    assert export(["messages", str(source), "--out", str(out)]) == 0
    for row in written(out / "messages.jsonl"):
        for place in row["sampled"] if row["thread"] != "side" else ():
            one = row["messages"][place]
            calls = [
                {"type": "tool_use", "name": c["function"]["name"], "input": c["function"]["arguments"]}
                for c in one.get("tool_calls", ())
            ]
            text = [{"type": "text", "text": one["content"]}] if one["content"] else []
            yield said(f"{row['episode']}/{row['number']}/{place}", text + calls, spelled=not row["tools"])


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) | {"number": number} for number, line in enumerate(file.read_text().splitlines())]


# --- the kinds of sources


def swesmith(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row of the export `messages` as SWE-smith's rows of the styles tool, ticks and (on its hub) one JSON text."""
    made: list[dict[str, Any]] = []
    for one in row["messages"]:
        message = {"role": one["role"], "content": one["content"]}
        calls = one.get("tool_calls", ())
        if kind == "ticks":
            message["role"] = "user" if one["role"] == "tool" else one["role"]
            for call in calls:
                message["content"] += f"\n\n```\n{json.dumps(call['function']['arguments'])}\n```"
        else:
            message |= {key: one[key] for key in ("tool_call_id",) if key in one}
            if calls:
                given = [{**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls]
                message["tool_calls"] = [{**c, "function": f} for c, f in zip(calls, given, strict=True)]
        made.append(message)
    whole: Any = json.dumps(made) if kind == "text" else made
    name = f"{row['episode']}.{row['number']}"
    return {"messages": whole, "traj_id": name, "instance_id": row["task"], "resolved": row["resolved"], "model": "m"}


def openhands(row: dict[str, Any], folder: Path) -> None:
    """Write a conversation as the events of OpenHands' SDK."""
    (folder / "events").mkdir(parents=True)
    (folder / "base_state.json").write_text(json.dumps({"agent": {"llm": {"model": "m"}}}))
    tools = [{"title": one["function"]["name"], **one["function"]} for one in row["tools"]]
    events: list[dict[str, Any]] = []
    for number, one in enumerate(row["messages"]):
        text = [{"type": "text", "text": one["content"]}]
        if one["role"] == "system":
            events.append({"kind": "SystemPromptEvent", "system_prompt": text[0], "tools": tools})
        elif one["role"] == "tool":
            events.append(
                {"kind": "ObservationEvent", "tool_call_id": one["tool_call_id"], "observation": {"content": text}}
            )
        elif one.get("tool_calls"):
            for call in one["tool_calls"]:
                asked = {"id": call["id"], "name": call["function"]["name"]}
                asked["arguments"] = json.dumps(call["function"]["arguments"])
                thought = text if one["content"] else []
                events.append(
                    {"kind": "ActionEvent", "llm_response_id": f"r{number}", "thought": thought, "tool_call": asked}
                )
        else:
            source = "agent" if one["role"] == "assistant" else "user"
            told = {"role": one["role"], "content": text}
            events.append({"kind": "MessageEvent", "source": source, "llm_message": told})
    for number, event in enumerate(events):
        (folder / "events" / f"event-{number:05}-e{number}.json").write_text(json.dumps({"id": f"e{number}", **event}))


class Source(NamedTuple):
    """A source is a run, or what ``rl.ingest FORMAT`` reads; ``truth``: the run that it is made of."""

    name: str
    place: Path
    format: str = ""
    truth: Path | None = None


def made_of(run: Path, out: Path) -> Iterator[Source]:
    """Write a run in every format that is read, and yield these."""
    assert export(["messages", str(run), "--out", str(out / "messages")]) == 0
    rows_ = [row for row in written(out / "messages" / "messages.jsonl") if row["thread"] == "main"]
    for format, kind in (("atif", "atif"), ("sessions", "claude-code"), ("swesmith-xml", "swe-agent")):
        assert export([format, str(run), "--out", str(out / format)]) == 0
        yield Source(format, out / format / ("ft_xml.jsonl" if format == "swesmith-xml" else ""), kind, run)
    for kind in SWESMITH[1:]:
        place = out / f"{kind}.jsonl"
        place.write_text("".join(json.dumps(swesmith(row, kind)) + "\n" for row in rows_))
        yield Source(f"SWE-smith {kind}", place, "swe-agent", run)
    for row in rows_:
        openhands(row, out / "openhands" / f"{row['episode']}.{row['number']}")
    yield Source("OpenHands", out / "openhands", "openhands", run)


def programs(source: Source, scratch: Path) -> dict[str, list[Told]]:
    """Return what each program reads of a source."""
    scratch.mkdir(parents=True)
    states = scratch / "states.jsonl.zst"
    status = ingest([source.format or "run", str(source.place), "--out", str(states), "--subagents"])
    assert status == 0, source
    run = recorded.write(states, scratch / "seen") if source.format else source.place
    found = {"trace": list(of_trace(run)), "rl.ingest": list(of_states(states))}
    found["viewer, terminal"], found["dataset"], found["spans"] = (
        list(of_view(run)),
        list(of_dataset(run)),
        list(of_spans(run)),
    )
    found["messages"] = list(of_messages(states if source.format else run, scratch / "messages"))
    for format, back in (("atif", "atif"), ("swesmith-xml", "swe-agent")):
        out, again = scratch / format, scratch / f"{format}.jsonl"
        assert export([format, str(states if source.format else run), "--out", str(out)]) == 0
        place = out / "ft_xml.jsonl" if format == "swesmith-xml" else out
        assert ingest([back, str(place), "--out", str(again), "--subagents"]) == 0
        found[f"{format}, read again"] = list(of_states(again))
    return found


def plain(told: Iterable[Told], ticks: bool) -> Counter[Any]:
    """Return what was said; between ticks only a command can stand, of whatever tool."""
    return Counter((o.text, tuple(COMMAND if ticks else call for call in o.calls)) for o in told)


def table(sources: Iterable[Source], scratch: Path) -> tuple[list[tuple[str, dict[str, str]]], int]:
    """Return the columns, and how many cells differ from what was said."""
    columns, wrong = [], 0
    truth: dict[Path, list[Told]] = {}
    for number, source in enumerate(sources):
        found = programs(source, scratch / str(number))
        base = truth.setdefault(source.truth or source.place, list(found["trace"]))
        ticks = "ticks" in source.name
        column = {}
        for name, told in found.items():
            more, less = plain(told, ticks) - plain(base, ticks), plain(base, ticks) - plain(told, ticks)
            cell = Cell.of(told)
            column[name] = " / ".join(map(str, cell))
            if more or less or cell.ids != cell.replies:
                wrong += 1
                column[name] += f" differs: {list(more)[:1]} for {list(less)[:1]}"
        columns.append((source.name, column))
    return columns, wrong


def collections(episodes: int, out: Path, kinds: Iterable[tuple[str, str]]) -> Iterator[Path]:
    """Play episodes with each back end and kind of ids, and yield the runs."""
    make_tasks(out / "tasks", seed=6, n_train=episodes, n_heldout=1)
    for back_end, kind in kinds:
        run = out / f"{back_end}-{kind.replace(' ', '-')}"
        yield asyncio.run(collect(kind, back_end, out / "tasks" / "train.parquet", run))


def sources_of(runs: Iterable[Path], out: Path) -> Iterator[Source]:
    """Yield the runs, and what is made of each."""
    for run in runs:
        yield Source(f"records, {run.name}", run)
        for one in made_of(run, out / f"{run.name}-as"):
            yield one._replace(name=f"{one.name}, {run.name}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trace_table", description=__doc__)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--run", type=Path, action="append", default=[])
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="trace-table-") as directory:
        out = Path(directory)
        each = -(-given.episodes // (2 * len(IDS)))
        kinds = itertools.product(("openai", "anthropic"), IDS) if each else ()
        runs = collections(max(each, 1), out, kinds)
        sources = [*sources_of(runs, out), *(Source(str(run), run) for run in given.run)]
        columns, wrong = table(sources, out / "read")
    for name, column in columns:
        print(name, *(f"    {program:<24} {cell}" for program, cell in column.items()), sep="\n")
    print(f"{wrong} cells differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
