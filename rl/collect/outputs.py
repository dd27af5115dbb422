"""This module writes what a collection keeps of each episode, and says which parts of it are missing.

    traces/<instance_id>/epoch_<n>/
        stream.jsonl      the agent's raw output, its event stream
        sessions/         its own session files, sub-agents' too, and what the shipped hooks were told (hooks.jsonl)
        agent.log         its standard error; grading.log: the end of the tests' log
        spans.jsonl.gz    the calls and the reward as spans (rl/collect/spans.py)
        patch.diff, episode.json
    dataset/<instance_id>.epoch_<n>.parquet     a row per call (rl/collect/dataset.py)

They are written before the episode's record, so that an episode with a record has all of them, and all except the first
three are made from the record. Files have [redacted] in place of the session's secret and of all secrets in this
process's environment; token ids and messages of records and datasets are exact.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from omegaconf import DictConfig

from rl.collect import dataset
from rl.collect.spans import spans_of
from rl.evaluate.run import Purpose
from rl.player import line_of
from rollout.agent import Status
from rollout.agent.events import message_id, read
from rollout.agent.kept import Kept
from rollout.episode import Episode, Setup
from rollout.proxy.calls import Conversation
from rollout.proxy.heard import Hearing, HearingPassThrough
from rollout.records import Record

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LEAST_SECRET = 8  # characters; shorter values are words
_SESSIONS = ".claude/projects/"


class Collection(Purpose):
    """A collection plays episodes for what is said in them."""

    split, log = "collect", "collect.log"
    server, forwarder = Hearing, HearingPassThrough

    def __init__(self, config: DictConfig) -> None:
        self.pause_s, self._grades = float(config.cooldown_s), bool(config.grade)
        self._tokens = config.protocol in ("tokens", "expert")
        given = {value for name, value in os.environ.items() if _SECRET.search(name) or name == config.key_env}
        self._secrets = [value.encode() for value in given if len(value) >= _LEAST_SECRET]

    def begin(self, directory: Path, setup: Setup) -> Setup:
        """Return the set-up that keeps what the agent leaves, and grades only if that is asked for."""
        self._dir = directory
        self._setup = replace(setup, keeps=True, grades=self._grades, shape=setup.shape if self._grades else None)
        return self._setup

    def kept(self, episode: Episode, record: Record) -> None:
        """Write the files of an attempt, and add the conversation, and what is missing, to its record."""
        proxy = self._setup.proxy
        assert isinstance(proxy, Hearing)  # see ``server`` and ``forwarder``
        talk = proxy.tell(record, episode.session)
        record.missing = [] if episode.verdict.is_infra else list(missing(episode, record, talk, self._grades))
        epoch = line_of(record)["sample"]
        secrets = [*self._secrets, *([episode.session.secret.encode()] if episode.session else [])]
        name = quote(record.task, safe="")
        self._write(self._dir / "traces" / name / f"epoch_{epoch}", episode, record, secrets)
        rows = self._dir / "dataset" / f"{name}.epoch_{epoch}.parquet"
        if episode.verdict.is_infra:
            rows.unlink(missing_ok=True)
        else:
            dataset.write(rows, record, epoch, self._setup.policy.tokenizer if self._tokens else None)

    def hints(self, directory: Path) -> list[tuple[str, str]]:
        """Return what can be done with a collection."""
        return [
            *super().hints(directory)[:2],
            ("load the rows", f'datasets.load_dataset("parquet", data_files="{directory}/dataset/*.parquet")'),
        ]

    def _write(self, place: Path, episode: Episode, record: Record, secrets: list[bytes]) -> None:
        kept = Kept(b"", b"") if episode.agent is None or episode.agent.kept is None else episode.agent.kept
        about = {name: value for name, value in line_of(record).items() if name != "patch"}
        spans = b"".join(json.dumps(span).encode() + b"\n" for span in spans_of(record))
        found = {
            "stream.jsonl": kept.stdout,
            "agent.log": kept.stderr,
            "grading.log": f"{episode.verdict.detail}\n{episode.verdict.log_tail}".encode(),
            "patch.diff": episode.patch,
            "episode.json": json.dumps(about, indent=1).encode(),
            **{f"sessions/{_inside(name)}": data for name, data in kept.files.items()},
        }
        new = place.with_name(f".{place.name}")
        shutil.rmtree(new, ignore_errors=True)
        for name, data in found.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(_redacted(data, secrets))
        (new / "spans.jsonl.gz").write_bytes(gzip.compress(_redacted(spans, secrets), 6, mtime=0))
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)


def _inside(name: str) -> str:
    return name.removeprefix(_SESSIONS).removeprefix(".claude/")


def _redacted(data: bytes, secrets: list[bytes]) -> bytes:
    for secret in secrets:
        data = data.replace(secret, b"[redacted]")
    return data


def missing(episode: Episode, record: Record, talk: Conversation, graded: bool) -> Iterator[str]:
    """Yield, in words, what an episode should have left behind but has not."""
    run = episode.agent
    if run is None or run.kept is None:
        yield "everything that the agent leaves"
        return
    yield from run.kept.problems
    if talk.lost:
        yield f"{talk.lost} calls, which are too large or whose reply cannot be read"
    calls = dataset.calls_of(record)
    if not calls:
        yield "any call to the model"
    sampled = {place for place, node in enumerate(record.nodes) if node.logprobs is not None and node.delivered}
    if silent := sampled - {call.node for call in calls}:
        yield f"the messages of {len(silent)} replies"
    if sampled and not record.rows:
        yield "training rows"
    if run.status is not Status.TIMEOUT and not any(event.get("type") == "result" for event in run.events):
        yield "the result at the end of the stream"
    known = {dataset.reply_of(record, call)[0] for call in calls}
    reported = {message_id(event) for event in run.events if event.get("type") == "assistant" and not _made_up(event)}
    if strange := reported - known - {""}:
        yield f"calls of {len(strange)} replies that the agent reports"
    sessions = {name: data for name, data in run.kept.files.items() if name.endswith(".jsonl")}
    if not any(name.startswith(_SESSIONS) and "/subagents/" not in name for name in sessions):
        yield "the agent's session file"
    written = {message_id(event) for data in sessions.values() for event in read(data)}
    main = {dataset.reply_of(record, call)[0] for call in calls if not call.side}
    if sessions and run.status is not Status.TIMEOUT and (unwritten := main - written):
        yield f"{len(unwritten)} replies in the agent's session files"
    if graded and record.verdict["reward"] is None:
        yield "the reward"


def _made_up(event: dict) -> bool:
    """Tell whether Claude Code wrote a message itself, such as one about an error of the API."""
    message = event.get("message")
    return isinstance(message, dict) and message.get("model") == "<synthetic>"
