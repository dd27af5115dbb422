"""Keep the sessions of the stand-alone proxy as records, for all programs that read a run's."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.agent import AgentRun, Status
from rollout.episode import Episode
from rollout.proxy.session import Session
from rollout.records import RecordWriter, record_of

SPLIT = "proxy"


class Recording:
    """A recording appends sessions to a new file in ``directory``/episodes. ``model``: the directory or hub name of
    their tokenizer. Raises OSError."""

    def __init__(self, directory: Path, model: str) -> None:
        self.model = str(Path(model).resolve()) if Path(model).is_dir() else model
        self._writer = RecordWriter(directory / "episodes", f"{time.time_ns()}-{os.getpid()}")
        self._lock = threading.Lock()

    def keep(self, session: Session) -> None:
        """Write the record of a session that is closed, whole or not at all; a session without replies has none.

        This may be called in a thread. Nobody graded it and nobody heard the agent, so the record has no patch, no
        reward and no events. Raises OSError.
        """
        begun = [node.started for node in session.tree.nodes if node.reply is not None]
        if not begun:
            return
        name = session.episode_id
        task = Task(name, "", "", "", (), (), "", "", "", "", "", None, Path())
        run = AgentRun(Status.FINISHED, session.turns(), "", [])
        episode = Episode(
            id=f"{SPLIT}-0-{name}-{uuid.uuid4().hex[:8]}",
            task=task,
            attempt=0,
            started=min(begun),
            verdict=Verdict(Reason.NOT_GRADED),
            session=session,
            agent=run,
            patch=b"",
            rows=session.tree.sequences(),
            timing={"total": time.time() - min(begun)},
        )
        record = record_of(episode, SPLIT, 0, self.model, session.policy.parser.spec)
        with self._lock:
            self._writer.append(record)

    def close(self) -> None:
        """Close the file; one without records is removed."""
        self._writer.close()
        if not self._writer.path.stat().st_size:
            self._writer.path.unlink()
