"""Episode records hold everything that happened in an episode, in one file format. docs/records.md describes it.

    python -m rollout.records RUN             list the episodes of a run (rl/view/terminal.py)
    python -m rollout.records RUN EPISODE     read one

A file is a sequence of frames and is only ever appended to. A frame is ``magic "CEP1", length u32, crc32 u32, payload``
(little endian), its payload a MessagePack map (``Record``), compressed with zstd. A crash leaves an incomplete last
frame, which readers drop and report; a complete frame with a wrong checksum is corruption, and an error. Token data is
the session tree itself: each node holds only what it adds to its parent.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from rollout.proxy.calls import CallRecord
from rollout.proxy.tree import TrainingSequence, Tree

if TYPE_CHECKING:
    from rollout.episode import Episode

VERSION = 5
READABLE = (1, 2, 3, 4, 5)
SEALED = 5  # the first version whose records have seals
SUFFIX = ".cep"
SELECTION = "selection.json"  # marks a directory whose records are copies of some from elsewhere
MAGIC = b"CEP1"
HEADER = struct.Struct("<4sII")
_LEVEL = 6
_LARGEST = 1 << 30  # bytes of an unpacked record; one of 10 million tokens has a tenth
_PLACE = ("number", "previous", "seal")  # what a seal is not over


class NodeRecord(msgspec.Struct, omit_defaults=True):
    """A node record is one node of the session tree.

    ``ids``: int32, ``logprobs``: float32, both little endian; ``parent``: index of the node before it, -1 for a root.
    ``says``, of a context: its messages as they went over the wire, a JSON list in which a number stands for the reply
    of that node in a new place; ``head``, of a root: [system prompt, tools], as JSON. Both are empty in records before
    version 4, and for what was too much to keep.

    The other fields belong to sampled nodes. ``blocks``: what the agent was sent; ``versions``: int32, the weight
    version of each id, empty if unknown (in records of version 1 a pair, the first and the last one). ``side``: whether
    it answers a side call; ``seal``: ``rollout.proxy.engine.Seals``; ``begins``, of a root: a hash of system prompt,
    tools and first message. Records before version 3 lack these three. ``started`` (Unix time) and ``seconds``: of the
    reply's generation; 0 before version 4. ``logprobs_of``: what the logprobs are of
    (``rollout.proxy.engine.Completion``); empty before version 5. ``role``: ``rollout.proxy.roles``; ``foreign``: the
    agent did not ask for it itself. Both are empty where roles are not told apart.
    """

    parent: int
    ids: bytes
    logprobs: bytes | None = None
    text: str = ""
    message_id: str = ""
    blocks: list[dict[str, Any]] = []
    stop_reason: str = ""
    stop_sequence: str | None = None
    ended: bool = True
    delivered: bool = False
    trained: bool = True
    tools_allowed: bool = True
    versions: bytes | tuple[int, int] = b""
    side: bool = False
    seal: bytes = b""
    begins: bytes = b""
    says: bytes = b""
    head: bytes = b""
    started: float = 0.0
    seconds: float = 0.0
    logprobs_of: str = ""
    role: str = ""
    foreign: bool = False

    @property
    def length(self) -> int:
        """Return the number of its tokens."""
        return len(self.ids) // 4


class RowRecord(msgspec.Struct):
    """A row record is one training row as it was handed to the trainer.

    ``nodes``: the sampled nodes that it trains; ``digest``: see ``row_digest``; ``versions``: the lowest and the
    highest weight version of these nodes, (0, 0) if unknown (and before version 3).
    """

    prompt_tokens: int
    response_tokens: int
    nodes: list[int]
    digest: str
    versions: tuple[int, int] = (0, 0)


class Record(msgspec.Struct, omit_defaults=True):
    """A record is one attempt on a task; all figures of an episode are computed from it.

    Times are in seconds, ``started`` is Unix time. ``model``: where the policy's tokenizer is; ``events``: the agent's
    own event stream; ``repo`` and ``difficulty``: the task's; ``overlong``: whether a limit ended the episode;
    ``train_side_calls``: whether side calls are trained on. ``number`` and ``previous``, which the writer fills in: the
    record's place in its file, from 0, and the SHA-256 of the payload before it. Older records lack the fields from
    ``repo`` on. ``seal``: see ``seal_of``; ``trainer``: the trainer's key of the episode, the name of the engine's
    replica that answered it, and figures of one's own. Both are empty before version 5.

    ``parts`` and ``calls``: forwarded calls (``rollout.proxy.calls``). ``missing``: what should have been kept of
    the episode but was not, in words.

    ``roles``: by role, what was done with its calls (``rollout.proxy.roles.Rule.told``); None: roles were not told
    apart. ``credit``: the reward of each row, empty if all have the episode's.
    """

    version: int
    episode: str
    task: str
    split: str
    step: int
    attempt: int
    started: float
    model: str
    parser: str
    sampling: dict[str, Any]
    nodes: list[NodeRecord]
    rows: list[RowRecord]
    verdict: dict[str, Any]
    agent: dict[str, Any]
    patch: bytes
    timing: dict[str, float]
    counters: dict[str, float]
    events: list[dict[str, Any]] = []
    repo: str = ""
    difficulty: str | None = None
    overlong: bool = False
    train_side_calls: bool = True
    number: int = 0
    previous: bytes = b""
    parts: list[bytes] = []
    calls: list[CallRecord] = []
    missing: list[str] = []
    trainer: dict[str, Any] = {}
    seal: bytes = b""
    roles: dict[str, dict[str, Any]] | None = None
    credit: list[float] = []


def seal_of(record: Record) -> bytes:
    """Return the SHA-256 of all that a record says, except for its place in its file (and the seal)."""
    return _content(msgspec.msgpack.encode(record))


def content_of(payload: bytes) -> bytes:
    """Return the same of a record as it is in a file, also of fields that this version does not know."""
    return _content(unpacked(payload))


def _content(data: bytes) -> bytes:
    said = {key: value for key, value in msgspec.msgpack.decode(data).items() if key not in _PLACE}
    return hashlib.sha256(msgspec.msgpack.encode(said)).digest()


def record_of(episode: Episode, split: str, step: int, model: str, parser: str) -> Record:
    """Return everything that is kept of an attempt.

    ``split`` and ``step``: where it belongs in its run; ``model`` and ``parser``: what its tokens are read with.
    """
    session, run, task = episode.session, episode.agent, episode.task
    return Record(
        version=VERSION,
        episode=episode.id,
        task=task.instance_id,
        split=split,
        step=step,
        attempt=episode.attempt,
        started=episode.started,
        model=model,
        parser=parser,
        sampling=dict(session.policy.sampling) if session else {},
        nodes=node_records(session.tree, session.foreign if session.roles else ()) if session else [],
        rows=row_records(episode.rows),
        verdict=episode.verdict.to_dict(),
        agent=_agent(episode),
        patch=episode.patch,
        timing=episode.timing,
        counters={name: float(count) for name, count in asdict(session.counters).items()} if session else {},
        events=run.events if run else [],
        repo=task.repo,
        difficulty=task.difficulty,
        overlong=episode.overlong,
        train_side_calls=session.policy.train_side_calls if session else True,
        parts=session.talk.parts if session else [],
        calls=session.talk.calls if session else [],
        missing=[f"{session.talk.lost} texts or calls"] if session and session.talk.lost else [],
        roles={name: rule.told for name, rule in session.roles.rules.items()} if session and session.roles else None,
        credit=list(episode.credit),
    )


def _agent(episode: Episode) -> dict[str, Any]:
    """Return the agent's name and how its run ended; how many events there are, whether they tell which replies the
    agent has received, and whether its connection was relayed."""
    named, run = {"kind": episode.played_by} if episode.played_by else {}, episode.agent
    if run is None:
        return named
    ended: dict[str, Any] = {"status": run.status.value, "turns": run.turns, "detail": run.detail}
    if episode.session is not None and episode.session.relayed:
        ended["relayed"] = True
    return {**named, **ended, "events": len(run.events), "reports": run.replies is not None}


def node_records(tree: Tree, foreign: Collection[int] = ()) -> list[NodeRecord]:
    """Return the nodes of a session tree, in their order. ``foreign``: those that the agent did not ask for itself."""
    out = []
    for node in tree.nodes:
        record = NodeRecord(parent=node.parent.index if node.parent else -1, ids=pack_ids(node.ids))
        record.says, record.head = node.says, node.head
        if node.parent is None:
            record.begins = hashlib.sha256(b"".join(node.key[:2])).digest()
        if node.reply is not None and node.logprobs is not None:
            record.logprobs = pack_floats(node.logprobs)
            record.text, record.ended, record.delivered = node.text, node.ended, node.delivered
            record.message_id, record.blocks = node.reply.id, list(node.reply.blocks)
            record.stop_reason, record.stop_sequence = node.reply.stop_reason, node.reply.stop_sequence
            record.trained, record.tools_allowed = node.trained, node.tools_allowed
            record.versions = pack_ids(list(node.versions))
            record.side, record.seal = node.side, node.seal
            record.role, record.foreign = node.asked.role if node.asked else "", node.index in foreign
            record.started, record.seconds, record.logprobs_of = node.started, node.seconds, node.logprobs_of
        out.append(record)
    return out


def path_of(nodes: Sequence[NodeRecord], leaf: int) -> list[int]:
    """Return the indices of the nodes from the root to ``leaf``."""
    path = [leaf]
    while 0 <= nodes[path[-1]].parent < path[-1]:  # a damaged record may have others
        path.append(nodes[path[-1]].parent)
    return path[::-1]


def row_records(rows: Sequence[TrainingSequence]) -> list[RowRecord]:
    """Return what is kept of training rows; their tokens are in the nodes."""
    return [
        RowRecord(
            prompt_tokens=len(row.prompt_ids),
            response_tokens=len(row.response_ids),
            nodes=list(row.nodes),
            digest=row_digest(row.prompt_ids, row.response_ids, row.mask, row.logprobs),
            versions=row.versions,
        )
        for row in rows
    ]


def row_digest(prompt_ids: list[int], response_ids: list[int], mask: list[int], logprobs: list[float]) -> str:
    """Return the SHA-256 over the four columns (int32, int32, one byte each, float32), each after its length."""
    digest = hashlib.sha256()
    for column in (pack_ids(prompt_ids), pack_ids(response_ids), bytes(mask), pack_floats(logprobs)):
        digest.update(struct.pack("<Q", len(column)))
        digest.update(column)
    return digest.hexdigest()


def pack_ids(ids: list[int]) -> bytes:
    """Return ids as int32, little endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> list[int]:
    """Return the ids that ``pack_ids`` packed."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def pack_floats(values: list[float]) -> bytes:
    """Return values as float32, little endian."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_floats(data: bytes) -> list[float]:
    """Return the values that ``pack_floats`` packed."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def unpacked(payload: bytes, by: zstandard.ZstdDecompressor | None = None) -> bytes:
    """Return what was compressed. ``by``: of the calling thread, for many records. Raises zstandard.ZstdError, also if
    it is larger than any record."""
    size = zstandard.frame_content_size(payload)
    if size > _LARGEST:
        raise zstandard.ZstdError(f"{size >> 20} MiB in a record; at most {_LARGEST >> 20} are read")
    return (by or zstandard.ZstdDecompressor()).decompress(payload, max_output_size=_LARGEST)


class RecordWriter:
    """A writer appends records to a new file of its own: one per process and start, so that nothing is ever appended
    behind a torn tail. Without ``synced``, records are on the disk only once it is closed. Raises FileExistsError."""

    def __init__(self, directory: Path, name: str, synced: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}{SUFFIX}"
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._number, self._previous, self._synced = 0, b"", synced

    def append(self, record: Record) -> None:
        """Write one record, and seal it if nobody has; with ``synced``, it is on the disk when this returns."""
        if record.version >= SEALED and not record.seal:
            record.seal = seal_of(record)
        placed = msgspec.structs.replace(record, number=self._number, previous=self._previous)
        self._write(msgspec.msgpack.encode(placed))

    def copy(self, payload: bytes) -> None:
        """Write a record of another file, unchanged except for its place; fields unknown to this version are kept."""
        record = msgspec.msgpack.decode(unpacked(payload))
        self._write(msgspec.msgpack.encode(record | {"number": self._number, "previous": self._previous}))

    def _write(self, data: bytes) -> None:
        payload = self._compressor.compress(data)
        end, left = self._file.tell(), memoryview(HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload)
        try:
            while left:
                left = left[self._file.write(left) :]
            if self._synced:
                os.fsync(self._file.fileno())
        except OSError:  # a full disk: nothing may follow a part of a frame
            self._file.truncate(self._file.seek(end))
            raise
        self._number, self._previous = self._number + 1, hashlib.sha256(payload).digest()

    def close(self) -> None:
        """Close the file."""
        if not self._synced:
            os.fsync(self._file.fileno())
        self._file.close()
