"""This module makes rows for supervised fine-tuning of states: ids and a mask, as ``rl.sft`` takes them.

A row is one state: its conversation has mask 0, its reply mask 1. Other tokens than the model's own may spell the same
text: recorded text is encoded anew here, with the chat template of the model that is trained. Texts that spell control
tokens stay text (``rollout/proxy/marks.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.ingest.lines import Findings
from rl.ingest.states import State, read_states
from rollout import files
from rollout.proxy.chat import chat_request
from rollout.proxy.marks import Marks
from rollout.proxy.messages import RequestError

_GROUP = 1 << 22  # tokens in a row group


class Encoder:
    """An encoder turns states into rows with a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._marks = tokenizer, Marks(tokenizer)

    def row(self, state: State) -> tuple[list[int], list[int]]:
        """Return the ids of a state and its reply, and the mask. Raises ValueError if the template cannot show them."""
        messages, tools = chat_of(state)
        last = messages.pop()
        try:
            prompt = self._text(messages, tools, add_generation_prompt=True)
            whole = self._text([*messages, last], tools, add_generation_prompt=False)
        except Exception:  # jinja's and the template's own have no common class; some refuse a second system message
            messages = [
                one if n == 0 or one["role"] != "system" else one | {"role": "user"} for n, one in enumerate(messages)
            ]
            try:
                prompt = self._text(messages, tools, add_generation_prompt=True)
                whole = self._text([*messages, last], tools, add_generation_prompt=False)
            except Exception as error:
                raise ValueError(f"the chat template refuses it: {error}") from error
        if not whole.startswith(prompt):
            raise ValueError("the chat template writes the conversation differently before a reply")
        head, reply = self._ids(prompt), self._ids(whole[len(prompt) :])
        end = self._tokenizer.eos_token_id
        if end in reply:  # what the template writes after a turn is not sampled
            reply = reply[: len(reply) - reply[::-1].index(end)]
        return [*head, *reply], [*[0] * len(head), *[1] * len(reply)]

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **options: Any) -> str:
        hidden = self._marks.hide(messages), self._marks.hide(tools) or None
        return self._tokenizer.apply_chat_template(hidden[0], tools=hidden[1], tokenize=False, **options)

    def _ids(self, text: str) -> list[int]:
        return self._marks.encode(text, lambda part: self._tokenizer.encode(part, add_special_tokens=False))


def chat_of(state: State) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a state's messages with its reply, and its tools, in chat form. Arguments are objects, not JSON text.

    Raises ValueError if a message has parts that are not there.
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


def rows(source: Path, encoder: Encoder, most: int | None, findings: Findings) -> Iterator[dict[str, Any]]:
    """Yield a row per state: state_id, input_ids, loss_mask. most: tokens of a row; longer ones are left out."""
    for state in read_states(source):
        try:
            ids, mask = encoder.row(state)
        except ValueError as error:
            findings.problem(f"state {state.state_id}", error)
            continue
        if most is not None and len(ids) > most:
            findings.counts[f"states of more than {most:,} tokens, left out"] += 1
        elif 1 not in mask:
            findings.counts["states with an empty reply, left out"] += 1
        else:
            yield {"state_id": state.state_id, "input_ids": ids, "loss_mask": mask}


def write(source: Path, out: Path, tokenizer: str, most: int | None, findings: Findings) -> int:
    """Write the rows of a states file to a parquet file; return how many. Raises ValueError and OSError."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    encoder = Encoder(AutoTokenizer.from_pretrained(tokenizer))
    ids, mask = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.int8())
    schema = pyarrow.schema([("state_id", pyarrow.string()), ("input_ids", ids), ("loss_mask", mask)])
    made = size = 0
    group: list[dict[str, Any]] = []
    with (
        files.replacing(out, synced=True) as new,
        pyarrow.parquet.ParquetWriter(new, schema, compression="zstd") as writer,
    ):
        for row in rows(source, encoder, most, findings):
            group.append(row)
            made, size = made + 1, size + len(row["input_ids"])
            if size >= _GROUP:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group, size = [], 0
        writer.write_table(pyarrow.Table.from_pylist(group, schema))
    return made
