"""This module makes rows of token ids, as ``rl.sft`` takes them, from states and from what teachers replied to them.

A row is a conversation with mask 0, in which the replies of its states have mask 1, or a pair of replies to one
conversation. The recorded text is encoded anew here, with the chat template of the model that is trained; the recorded
model may have sampled other tokens for it. Texts that spell control tokens stay text (``rollout/proxy/marks.py``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.ingest.lines import LONGEST_LINE, Findings, decode, lines, repaired
from rl.ingest.states import State, read_states
from rl.tune.given import PAIRS, ROWS, TOKENIZER, digest
from rollout import files
from rollout.proxy.chat import chat_request
from rollout.proxy.marks import Marks
from rollout.proxy.messages import RequestError
from rollout.proxy.render import as_user, end_of_turn

_GROUP = 1 << 22  # tokens in a row group
Chat = dict[str, Any]  # a chat message, or a tool
Kind = TypeVar("Kind")


class Encoder:
    """An encoder turns conversations into ids with a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._marks = tokenizer, Marks(tokenizer)
        (self._end,) = end_of_turn(tokenizer) or [tokenizer.eos_token_id]

    def ids(self, chat: Sequence[Chat], tools: list[Chat]) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation in chat form: of all but its last message, and of that one.

        Raises ValueError if the template cannot show them.
        """
        *messages, last = chat
        try:
            prompt = self._text(messages, tools, add_generation_prompt=True)
            whole = self._text([*messages, last], tools, add_generation_prompt=False)
        except Exception:  # jinja's and the template's own have no common class; some refuse a second system message
            messages = [*messages[:1], *map(as_user, messages[1:])]
            try:
                prompt = self._text(messages, tools, add_generation_prompt=True)
                whole = self._text([*messages, last], tools, add_generation_prompt=False)
            except Exception as error:
                raise ValueError(f"the chat template refuses it: {error}") from error
        if not whole.startswith(prompt):
            raise ValueError("the chat template writes the conversation differently before a reply")
        head, reply = self._ids(prompt), self._ids(whole[len(prompt) :])
        if self._end in reply:  # what the template writes after a turn is not sampled
            reply = reply[: len(reply) - reply[::-1].index(self._end)]
        return head, reply

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **options: Any) -> str:
        hidden = self._marks.hide(messages), self._marks.hide(tools) or None
        return self._tokenizer.apply_chat_template(hidden[0], tools=hidden[1], tokenize=False, **options)

    def _ids(self, text: str) -> list[int]:
        return self._marks.encode(text, lambda part: self._tokenizer.encode(part, add_special_tokens=False))


def chat_of(state: State) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a state's messages with its reply, and its tools, in chat form. Arguments are objects, not JSON text.

    Raises ValueError if a message lacks something that its form requires.
    """
    system, *talk = state.messages
    asked = {"system": system["content"], "messages": [*talk, state.student_action], "tools": state.tools}
    try:
        chat = chat_request(asked, "")
    except RequestError as error:
        raise ValueError(str(error)) from error
    for message in chat["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chat["messages"], chat.get("tools", [])


class _Taught(msgspec.Struct):
    """This is a line of distill.jsonl or of a TRL data set: a conversation that ends with the reply that is trained."""

    messages: list[Chat]
    tools: list[Chat] = []
    state_id: str = ""


class _Pair(msgspec.Struct):
    """This is a line of pairs.jsonl: two replies to the same conversation."""

    prompt: list[Chat]
    chosen: list[Chat]
    rejected: list[Chat]
    tools: list[Chat] = []
    state_id: str = ""


def _kind(source: Path) -> type[_Taught] | type[_Pair] | None:
    """Return what the lines of a file are; None: states. Raises OSError."""
    with open(source, "rb") as file:
        first = file.readline(LONGEST_LINE)
    for kind in (_Taught, _Pair):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(first, type=kind)
            return kind
    return None


def _lines(source: Path, kind: type[Kind], findings: Findings) -> Iterator[tuple[str, Kind]]:
    decoder = msgspec.json.Decoder(kind)
    for number, text in lines(source, findings):
        try:
            yield f"{source}: line {number}", repaired(decode(text, decoder))
        except ValueError as error:
            findings.problem(f"{source}: line {number}", error)


def rows(source: Path, encoder: Encoder, most: int | None, findings: Findings) -> Iterator[dict[str, Any]]:
    """Yield rows of states, or of what teachers said: state_id, and the columns of ROWS or PAIRS.

    A state whose ids go on from those of the one before shares its row, which has the later state's id: each reply is
    trained once, and the conversation is read once. most: tokens of a row; longer states are left out.
    """
    before: dict[str, Any] = {}
    kind = _kind(source)
    if kind is None:
        found: Iterator[tuple[str, Any]] = ((f"state {state.state_id}", state) for state in read_states(source))
    else:
        found = _lines(source, kind, findings)
    for where, one in found:
        try:
            columns = _columns(encoder, one)
        except ValueError as error:
            findings.problem(where, error)
            continue
        first, *replies = columns.values()
        if most is not None and (len(first) + max(map(len, replies)) if kind is _Pair else len(first)) > most:
            findings.counts[f"states of more than {most:,} tokens, left out"] += 1
        elif not all(any(tokens) for tokens in replies):
            findings.counts["states with an empty reply, left out"] += 1
        else:
            row: dict[str, Any] = {"state_id": one.state_id, **columns}
            ids = before.get("input_ids")
            if ids and row["input_ids"][: row["loss_mask"].index(1)][: len(ids)] == ids:
                row["loss_mask"][: len(ids)] = before["loss_mask"]
            elif before:
                yield before
            before = row
    if before:
        yield before


def _columns(encoder: Encoder, one: State | _Taught | _Pair) -> dict[str, list[int]]:
    """Return what is in a row, in the order of ROWS or PAIRS. Raises ValueError."""
    if isinstance(one, _Pair):
        sides = [encoder.ids([*one.prompt, *side], one.tools) for side in (one.chosen, one.rejected)]
        if sides[0][0] != sides[1][0]:
            raise ValueError("the chat template writes the conversation differently before each reply")
        return dict(zip(PAIRS, (sides[0][0], sides[0][1], sides[1][1]), strict=True))
    head, reply = encoder.ids(*(chat_of(one) if isinstance(one, State) else (one.messages, one.tools)))
    return dict(zip(ROWS, ([*head, *reply], [*[0] * len(head), *[1] * len(reply)]), strict=True))


def write(
    source: Path,
    out: Path,
    tokenizer: str,
    most: int | None,
    findings: Findings,
    show: Callable[[int], object] = lambda made: None,
) -> int:
    """Write the rows of a file to a parquet file; return how many. show: is called with how many are made.

    Raises ValueError and OSError.
    """
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    coder = AutoTokenizer.from_pretrained(tokenizer)
    names = PAIRS if _kind(source) is _Pair else ROWS
    kinds = {"state_id": pyarrow.string(), "loss_mask": pyarrow.list_(pyarrow.int8())}
    fields = [(name, kinds.get(name, pyarrow.list_(pyarrow.int32()))) for name in ("state_id", *names)]
    schema = pyarrow.schema(fields, metadata={TOKENIZER: digest(coder)})
    made = size = 0
    group: list[dict[str, Any]] = []
    with (
        files.replacing(out, synced=True) as new,
        pyarrow.parquet.ParquetWriter(new, schema, compression="zstd") as writer,
    ):
        for row in rows(source, Encoder(coder), most, findings):
            group.append(row)
            made, size = made + 1, size + sum(len(row[name]) for name in names)
            show(made)
            if size >= _GROUP:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group, size = [], 0
        writer.write_table(pyarrow.Table.from_pylist(group, schema))
    return made
