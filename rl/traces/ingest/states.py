"""Write and read states: what an agent had read before one of its replies, and that reply.

A states file has one JSON object per line (compressed if its name ends in .zst). Each message is in it once: a message
names the one before it, and a state the last one that it has, so a file grows with what is new in each step.

    {"type": "states", "schema_version": 1}
    {"type": "conversation", "conversation": ..., "format": ..., "outcome": {...}}    numbers begin again at 0
    {"type": "head", "system": ..., "tools": [...]}
    {"type": "message", "after": -1, "message": {"role": ..., "content": ...}}
    {"type": "state", "state_id": ..., "head": 0, "tip": 7, "student_action": {...}, ...}

``read_states`` yields full states. A conversation that goes on after a compaction begins once more in the file, with
messages of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import zstandard

from rl.traces.ingest.gate import Gate, GateState, Message
from rollout import files
from rollout.proxy.blocks import blocks_of

SCHEMA_VERSION = 1
_LONGEST = 256 << 20  # bytes of a line; one that is longer is no JSON where it is cut
_THINKING = ("thinking", "redacted_thinking")


class StatesError(ValueError):
    """A states file cannot be read. The message is one line that names the file and the line."""


class _StateBase(msgspec.Struct, kw_only=True):
    """This is what a state and its line have in common."""

    state_id: str
    student_action: Message
    source_model: str
    where: str = ""
    exact: bool = False
    agent: list[str] = []
    spawned_by: str | None = None


class State(_StateBase, kw_only=True):
    """A state is a conversation up to one reply of a model, and that reply, in the form of Anthropic's Messages API.

    ``messages``: the system prompt first (an empty text if it is unknown), then all that the model had read, without
    thinking; ``tools``: those that were offered, if known; ``student_action``: the reply, with its thinking.
    ``exact``: the request was rebuilt and its digest is the recorded one. ``agent``: the ids of the sub-agents that the
    reply is inside of, outermost first; ``spawned_by``: the id of the call that began the innermost one.
    ``outcome``: what is known of how the conversation ended (``resolved``, ``reward``, ``instance_id``).
    """

    messages: list[Message]
    schema_version: int = SCHEMA_VERSION
    tools: list[dict[str, Any]] = []
    format: str = ""
    conversation: str = ""
    outcome: dict[str, Any] = {}


class _File(msgspec.Struct, tag="states"):
    schema_version: int


class _Conversation(msgspec.Struct, tag="conversation"):
    conversation: str
    format: str
    outcome: dict[str, Any] = {}


class _Head(msgspec.Struct, tag="head"):
    system: str | list[Message]
    tools: list[dict[str, Any]] = []


class _Message(msgspec.Struct, tag="message"):
    after: int
    message: msgspec.Raw


class _StateLine(_StateBase, tag="state", omit_defaults=True, kw_only=True):
    head: int
    tip: int


_Line = _File | _Conversation | _Head | _Message | _StateLine


def without_thinking(message: Message) -> Message | None:
    """Return ``message`` as it stands in a history; None if it is thinking and nothing else."""
    content = message["content"]
    if message["role"] != "assistant" or isinstance(content, str):
        return message
    kept = [block for block in content if block.get("type") not in _THINKING]
    if len(kept) == len(content):
        return message
    return {**message, "content": kept} if kept else None


class StateWriter:
    """A state writer appends conversations to an open states file. ``states``: how many it has written; ``unnamed``:
    those whose model is not known; ``left``: replies that are left out, by the reason (``rl.traces.ingest.gate``).

    ``system`` and ``tools``: those of conversations that do not name theirs. Raises OSError when the disk is full.
    """

    def __init__(self, out: IO[bytes], system: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._out, self._encoder, self._system, self._tools = out, msgspec.json.Encoder(), system, tools
        self._seen: set[bytes] = set()
        self.states = self.unnamed = 0
        self.left = Counter[str]()
        self.block = 0  # which conversation is being written; numbers of messages hold within it
        self._write(_File(SCHEMA_VERSION))

    def begin(self, conversation: str, format: str, outcome: Mapping[str, Any] | None = None) -> None:
        """Begin a conversation, or the part of one that follows a compaction."""
        self.block += 1
        self._heads: dict[bytes, int] = {}
        self._known: dict[tuple[int, bytes], int] = {}
        self._gate, self._places = Gate(), list[GateState]()
        told = dict(outcome or {})
        if "resolved" in told:
            try:  # some data sets have it as a text
                told["resolved"] = msgspec.convert(told["resolved"], bool, strict=False)
            except msgspec.ValidationError:
                del told["resolved"]
        self._write(_Conversation(conversation, format, told))

    def head(self, system: str | list[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of a system prompt with its tools (in Anthropic's form); write it if it is new."""
        line = self._encoder.encode(_Head(system or self._system, [dict(tool) for tool in tools or self._tools]))
        key = hashlib.sha256(line).digest()
        if key not in self._heads:
            self._heads[key] = len(self._heads)
            self._out.write(line + b"\n")
        return self._heads[key]

    def message(self, after: int, message: Message) -> int:
        """Write a message that follows number ``after`` (-1: it is the first), and return its number."""
        kept = without_thinking(message)
        if kept is None:
            return after
        self._write(_Message(after, msgspec.Raw(self._encoder.encode(kept))))
        self._places.append(self._gate.after(self._places[after] if after >= 0 else None, kept))
        return len(self._places) - 1

    def tip(self, messages: Sequence[Message]) -> int:
        """Return the number of the last of ``messages``; those that are already there, in this order, are not written
        again."""
        after = -1
        for message in messages:
            key = after, hashlib.sha256(self._encoder.encode(message)).digest()
            if key not in self._known:
                self._known[key] = self.message(after, message)
            after = self._known[key]
        return after

    def state(self, state_id: str, head: int, tip: int, action: Message, model: str, **more: Any) -> bool:
        """Write a state, unless one of this id is there or it breaks a rule; return whether it is written.

        ``more``: ``where``, ``exact``, ``agent`` and ``spawned_by``, see State.
        """
        key = hashlib.blake2b(state_id.encode("utf-8", "replace"), digest_size=8).digest()
        why = "there already" if key in self._seen else ""
        why = why or self._gate.wrong(self._places[tip] if tip >= 0 else None, action)
        self._seen.add(key)
        if why:
            self.left[why] += 1
            return False
        self._write(
            _StateLine(state_id=state_id, student_action=action, source_model=model, head=head, tip=tip, **more)
        )
        self.states += 1
        self.unnamed += not model
        return True

    def _write(self, line: _Line) -> None:
        self._out.write(self._encoder.encode(line) + b"\n")


@contextlib.contextmanager
def writing(path: Path, system: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> Generator[StateWriter]:
    """Yield a writer of a new states file, which takes the place of ``path`` when the block is left without an error.

    system, tools: see StateWriter. .jsonl and .jsonl.zst are states files; .parquet has a row per state, with all of
    its messages. Raises OSError, and ValueError for another name.
    """
    if path.suffix == ".parquet":
        with files.replacing(path, synced=True) as new:
            between = new.with_name(f"{new.name}.jsonl.zst")
            try:
                with writing(between, system, tools) as writer:
                    yield writer
                _write_rows(new, read_states(between))
            finally:
                between.unlink(missing_ok=True)
    elif path.name.endswith((".jsonl", ".jsonl.zst")):
        with files.replacing(path, synced=True) as new, open(new, "wb", buffering=1 << 20) as raw:
            packed = zstandard.ZstdCompressor().stream_writer(raw, closefd=False) if path.suffix == ".zst" else None
            with packed or contextlib.nullcontext(raw) as out:
                yield StateWriter(out, system, tools)
    else:
        raise ValueError(f"{path}: the name must end in .jsonl, .jsonl.zst or .parquet")


def read_states(path: Path) -> Iterator[State]:
    """Yield the states of a states file in their order, each with all of its messages.

    States share their messages: don't change them. Raises StatesError and OSError.
    """
    number = 0
    try:
        with _opened(path) as file:
            decoder, lines = msgspec.json.Decoder(_Line), enumerate(iter(lambda: file.readline(_LONGEST), b""), 1)
            number, first = next(lines, (1, b""))
            if decoder.decode(first) != _File(SCHEMA_VERSION):
                raise StatesError(f"{path}: line 1: this is no states file of schema version {SCHEMA_VERSION}")
            about, heads = _Conversation("", ""), list[_Head]()
            messages: list[tuple[int, Message]] = []
            for number, text in lines:
                match decoder.decode(text):
                    case _Conversation() as about:
                        heads, messages = [], []
                    case _Head() as head:
                        heads.append(head)
                    case _Message(after=after, message=raw):
                        if not -1 <= after < len(messages):
                            raise StatesError(f"{path}: line {number}: there is no message {after}")
                        messages.append((after, msgspec.json.decode(raw, type=Message)))
                    case _StateLine() as step:
                        yield _full(step, about, heads[step.head], messages)
    except StatesError:
        raise
    except (msgspec.MsgspecError, zstandard.ZstdError, UnicodeDecodeError, IndexError, RecursionError) as error:
        raise StatesError(f"{path}: line {number}: {error}; `python -m rl.ingest` makes states files") from error


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(files.opened(path), closefd=True), 1 << 20)
    return files.opened(path)


def _full(step: _StateLine, about: _Conversation, head: _Head, messages: list[tuple[int, Message]]) -> State:
    path: list[Message] = []
    at = step.tip
    while at >= 0:
        at, message = messages[at]
        if path and message["role"] == path[-1]["role"] == "user":  # what stood between them was no message
            path[-1] = {"role": "user", "content": [*blocks_of(message["content"]), *blocks_of(path[-1]["content"])]}
        else:
            path.append(message)
    path.append({"role": "system", "content": head.system})
    own = msgspec.structs.asdict(about) | msgspec.structs.asdict(step)
    del own["head"], own["tip"]
    return State(messages=path[::-1], tools=head.tools, **own)


# Bytes of messages in a row group. Each text is in a group's dictionary once, however many states have it.
_GROUP = 32 << 20


def _write_rows(path: Path, states: Iterable[State]) -> None:
    """Write states as rows: contents that are more than a text are JSON, as in a collection. Raises OSError."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    messages = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
    kinds = {"messages": messages, "agent": pyarrow.list_(text)}
    kinds |= {"schema_version": pyarrow.int32(), "exact": pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds.get(name, text)) for name in State.__struct_fields__])
    size, group = 0, list[dict[str, Any]]()
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd", dictionary_pagesize_limit=_GROUP) as writer:
        for state in states:
            row = msgspec.structs.asdict(state)
            row |= {name: _flat(row[name]) for name in ("student_action", "tools", "outcome")}
            row["messages"] = [{"role": one["role"], "content": _flat(one["content"])} for one in state.messages]
            group.append(row)
            size += sum(len(one["content"]) for one in row["messages"])
            if size >= _GROUP:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                size, group = 0, []
        writer.write_table(pyarrow.Table.from_pylist(group, schema))


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
