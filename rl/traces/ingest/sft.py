"""Make rows of token ids, as ``rl.sft`` takes them, from states and from what teachers replied to them.

A row is a conversation with mask 0, in which the replies of its states have mask 1, or a pair of replies to one
conversation. The recorded text is encoded anew here, with the chat template of the model that is trained; the recorded
model may have sampled other tokens for it. Texts that spell control tokens stay text (``rollout/proxy/marks.py``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl.traces.ingest.asking import limited
from rl.traces.ingest.lines import LONGEST_LINE, Findings, values
from rl.traces.ingest.states import State
from rl.traces.rows import NAME, PAIRS, ROWS, Row, length
from rl.traces.rows import write as write_columns
from rollout.proxy.chat import chat_request
from rollout.proxy.marks import Marks
from rollout.proxy.messages import RequestError
from rollout.proxy.render import as_user, end_ids, generation_config, turn_end

Chat = dict[str, Any]  # a chat message, or a tool


class ChatEncoder:
    """An encoder turns conversations into ids with a Hugging Face tokenizer and its chat template.

    stops: the ids at which an engine stops (``rollout.proxy.render.end_ids``).
    """

    def __init__(self, tokenizer: Any, stops: Collection[int] = ()) -> None:
        self._tokenizer, self._marks = tokenizer, Marks(tokenizer)
        self._ends = {*stops, turn_end(tokenizer)}

    def ids(self, chat: Sequence[Chat], tools: list[Chat]) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation in chat form: of all but its last message, and of that one, which ends with
        the token that closes the turn.

        Raises ValueError if the template cannot show them, or writes no such token.
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
        last_end = max((place for place, token in enumerate(reply) if token in self._ends), default=-1)
        if last_end >= 0:  # what the template writes after a turn is not sampled
            return head, reply[: last_end + 1]
        # In some families the next role's token closes a turn.
        named = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in last.get("tool_calls", ())]
        more = self._text([*messages, last, *(named or [{"role": "user", "content": "x"}])], tools)
        after = self._ids(more[len(whole) :]) if more.startswith(whole) else []
        if not after or after[0] not in self._ends:
            raise ValueError("the chat template closes the reply with no token at which an engine stops")
        return head, [*reply, after[0]]

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


class _TrainingLine(msgspec.Struct):
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


def _kind(source: Path) -> type[_TrainingLine] | type[_Pair] | None:
    """Return what the lines of a file are; None: states. Raises OSError."""
    with open(source, "rb") as file:
        first = file.readline(LONGEST_LINE)
    for kind in (_TrainingLine, _Pair):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(first, type=kind)
            return kind
    return None


def rows(source: Path, encoder: ChatEncoder, most: int | None, findings: Findings) -> Iterator[tuple[str, Row]]:
    """Yield rows of states, or of what teachers said: the state's id, and the columns of ROWS or PAIRS.

    A state whose ids go on from those of the one before shares its row, which has the later state's id: each reply is
    trained once, and the conversation is read once. most: tokens of a row; longer states are left out.
    """
    before: tuple[str, Row] | None = None
    kind = _kind(source)
    if kind is None:
        found: Any = ((f"state {one.state_id}", one) for one in limited(source, None, findings.counts))
    else:
        found = values(source, kind, findings)
    for where, one in found:
        try:
            row = _row(encoder, one)
        except ValueError as error:
            findings.problem(where, error)
            continue
        if most is not None and length(row) > most:
            findings.counts[f"states of more than {most:,} tokens, left out"] += 1
        elif not all(any(tokens) for tokens in row[1:]):
            findings.counts["states with an empty reply, left out"] += 1
        else:
            if before and not _goes_on(before[1], row):
                yield before
            before = one.state_id, row
    if before:
        yield before


def _goes_on(before: Row, row: Row) -> bool:
    """Tell whether a row's conversation goes on from the row before, whose mask it takes over then."""
    if len(row) != len(ROWS):
        return False
    (known, trained), (ids, mask) = before, row
    if ids[: mask.index(1)][: len(known)] != known:
        return False
    mask[: len(known)] = trained
    return True


def _row(encoder: ChatEncoder, one: State | _TrainingLine | _Pair) -> Row:
    """Return what is in a row, in the order of ROWS or PAIRS. Raises ValueError."""
    if isinstance(one, _Pair):
        sides = [encoder.ids([*one.prompt, *side], one.tools) for side in (one.chosen, one.rejected)]
        if sides[0][0] != sides[1][0]:
            raise ValueError("the chat template writes the conversation differently before each reply")
        return *sides[0], sides[1][1]
    head, reply = encoder.ids(*(chat_of(one) if isinstance(one, State) else (one.messages, one.tools)))
    return [*head, *reply], [*[0] * len(head), *[1] * len(reply)]


def write(
    source: Path, out: Path, tokenizer: str, most: int | None, findings: Findings, show: Callable[[int], object]
) -> int:
    """Write the rows of a file to a parquet file; return how many. show: is called with how many are made.

    Raises ValueError and OSError.
    """
    from transformers import AutoTokenizer

    coder = AutoTokenizer.from_pretrained(tokenizer)
    encoder = ChatEncoder(coder, end_ids(coder, generation_config(tokenizer)))

    def shown() -> Iterator[list[Any]]:
        for made, (state, row) in enumerate(rows(source, encoder, most, findings), 1):
            show(made)
            yield [state, *row]

    return write_columns(out, (NAME, *(PAIRS if _kind(source) is _Pair else ROWS)), shown(), coder)
