"""The files that a collection keeps of each episode: write them, and say which parts are missing.

    traces/<instance_id>/epoch_<n>/
        stream.jsonl      the agent's raw output, its event stream
        sessions/         its own session files, sub-agents' too, and what the shipped hooks were told (hooks.jsonl)
        agent.log         its standard error; grading.log: the end of the tests' log
        spans.jsonl.gz    the calls and the reward as spans (rl/traces/collect/spans.py)
        patch.diff, episode.json
    dataset/<instance_id>.epoch_<n>.parquet     a row per reply (rl/traces/collect/dataset.py)

They are written before the episode's record, so that an episode with a record has all of them, and all except the first
three are made from the record. Files have [redacted] in place of the session's secret and of all secrets in this
process's environment; token ids and messages of records and datasets are exact.
"""

from __future__ import annotations

import functools
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

from rl.evaluate.run import Purpose
from rl.traces.collect import dataset
from rl.traces.collect.spans import spans_of
from rollout.agent import Status
from rollout.agent.events import message_id, read
from rollout.agent.kept import AgentOutput
from rollout.episode import Episode, Setup
from rollout.figures import journal_line
from rollout.records import Record
from rollout.trace import Trace, trace

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LEAST_SECRET = 8  # characters; shorter values are words
_SESSIONS = ".claude/projects/"


class Collection(Purpose):
    """A collection plays episodes for what is said in them."""

    split, log = "collect", "collect.log"

    def __init__(self, config: DictConfig) -> None:
        self.config, self.pause_s, self._grades = config, float(config.cooldown_s), bool(config.grade)
        self._tokens = config.protocol in ("tokens", "expert")
        given = {value for name, value in os.environ.items() if _SECRET.search(name) or name == config.key_env}
        self._secrets = [value.encode() for value in given if len(value) >= _LEAST_SECRET]

    def begin(self, directory: Path, setup: Setup) -> Setup:
        """Return the set-up that keeps what the agent leaves, and grades only if that is asked for."""
        self._dir = directory
        self._setup = replace(setup, keeps=True, grades=self._grades, shape=setup.shape if self._grades else None)
        return self._setup

    def kept(self, episode: Episode, record: Record) -> None:
        """Write the files of an attempt, and add what is missing to its record."""
        found = trace(record)
        record.missing = [] if episode.verdict.is_infra else list(missing(episode, found, self._grades))
        epoch = journal_line(record)["sample"]
        secrets = [*self._secrets, *([episode.session.secret.encode()] if episode.session else [])]
        name = quote(record.task, safe="")
        self._write(self._dir / "traces" / name / f"epoch_{epoch}", episode, found, secrets)
        rows = self._dir / "dataset" / f"{name}.epoch_{epoch}.parquet"
        if episode.verdict.is_infra:
            rows.unlink(missing_ok=True)
        else:
            dataset.write(rows, found, epoch, self._setup.policy.tokenizer if self._tokens else None)

    def hints(self, directory: Path) -> list[tuple[str, str]]:
        """Return what can be done with a collection."""
        return [
            *super().hints(directory)[:3],
            ("load the rows", f'datasets.load_dataset("parquet", data_files="{directory}/dataset/*.parquet")'),
        ]

    def _write(self, place: Path, episode: Episode, found: Trace, secrets: list[bytes]) -> None:
        kept = AgentOutput(b"", b"") if episode.agent is None or episode.agent.kept is None else episode.agent.kept
        about = {name: value for name, value in journal_line(found.record).items() if name != "patch"}
        data = {
            "stream.jsonl": kept.stdout,
            "agent.log": kept.stderr,
            "grading.log": f"{episode.verdict.detail}\n{episode.verdict.log_tail}".encode(),
            "patch.diff": episode.patch,
            "episode.json": json.dumps(about, indent=1).encode(),
        }
        for name, one in kept.files.items():
            data[f"sessions/{name.removeprefix(_SESSIONS).removeprefix('.claude/')}"] = one
        new = place.with_name(f".{place.name}")
        shutil.rmtree(new, ignore_errors=True)  # left by a killed process

        def redacted(text: bytes) -> bytes:
            return functools.reduce(lambda text, secret: text.replace(secret, b"[redacted]"), secrets, text)

        new.mkdir(parents=True)
        with gzip.GzipFile(new / "spans.jsonl.gz", "wb", 6, mtime=0) as out:
            for span in spans_of(found):  # each has all that was said before it
                out.write(redacted(json.dumps(span).encode() + b"\n"))
        for name, text in data.items():
            try:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(redacted(text))
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                found.record.missing.append(f"the file {name}, whose place another one of the agent's has")
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)


def missing(episode: Episode, found: Trace, graded: bool) -> Iterator[str]:
    """Yield, in words, what an episode should have left behind but has not."""
    run, record = episode.agent, found.record
    if run is None or run.kept is None:
        yield "everything that the agent leaves"
        return
    yield from [*run.kept.problems, *record.missing]
    if not found.points:
        yield "any call to the model"
    if any(point.node >= 0 and point.delivered for point in found.points) and not record.rows:
        yield "training rows"
    if run.status is not Status.TIMEOUT and not any(event.get("type") == "result" for event in run.events):
        yield "the result at the end of the stream"
    known = {point.name for point in found.points}
    reported = {message_id(event) for event in run.events if event.get("type") == "assistant" and not _made_up(event)}
    if strange := reported - known - {""}:
        yield f"calls of {len(strange)} replies that the agent reports"
    sessions = {name: data for name, data in run.kept.files.items() if name.endswith(".jsonl")}
    if run.kept.places and not any(name.startswith(_SESSIONS) and "/subagents/" not in name for name in sessions):
        yield "the agent's session file"
    written = {message_id(event) for data in sessions.values() for event in read(data)}
    main = {point.name for point in found.points if not point.side and point.delivered}
    if sessions and run.status is not Status.TIMEOUT and (unwritten := main - written):
        yield f"{len(unwritten)} replies in the agent's session files"
    if graded and record.verdict["reward"] is None:
        yield "the reward"


def _made_up(event: dict) -> bool:
    """Tell whether Claude Code wrote a message itself, such as one about an error of the API."""
    message = event.get("message")
    return isinstance(message, dict) and message.get("model") == "<synthetic>"
