"""The episodes of an interrupted rollout, kept so that the resumed run plays only the others.

``unfinished/`` in the run directory holds ``groups.json``, which is written last, and a file of training rows for each
group. The groups are in the order in which verl's data loader drew their prompts. The checkpoint beside them has the
loader's position from before the first of them: the resumed step draws the same prompts again, and the n-th of them is
the n-th group here. So no prompt is lost or drawn twice, whether these files are used or not. They are only used by
the first step after the checkpoint that they belong to, because later ones have other weights.

A group that dynamic filtering has replaced comes back as rows that hold nothing but its reward: verl's buffer replaces
it once more, and its metrics are those of an uninterrupted step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.train.groups import group_of, session_of
from rollout import files

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)
REPLACED = "replaced"
Row = tuple[str, dict[str, Any], dict[str, Any]]  # key, tags and fields in TransferQueue


@dataclass(frozen=True)
class DrawnGroup:
    """A drawn group is a prompt that was drawn. ``task`` is its place in the data set, ``status`` TransferQueue's
    (running, finished, failure) or ``REPLACED``, ``sessions`` the keys of the episodes that have rows. ``reward`` is
    that of all episodes of a replaced group."""

    uid: str
    task: int
    status: str
    sessions: list[str]
    reward: float = 0.0

    @property
    def has_rows(self) -> bool:
        """Tell whether training rows of the group are kept."""
        return bool(self.sessions) and self.status != REPLACED


@dataclass(frozen=True)
class UnfinishedStep:
    """This is what is kept of the step after the checkpoint of step ``after``. ``lost`` and ``ended`` are the counts of
    ``rl.train.groups.GroupBuffer``, which decide how many groups a step starts."""

    after: int
    groups: list[DrawnGroup]
    lost: float = 0.0
    ended: float = 0.0

    @property
    def episodes(self) -> int:
        """Count the episodes that need not be played again."""
        return sum(len(group.sessions) for group in self.groups)

    def has(self, session: str) -> bool:
        """Tell whether the episode with the key ``session`` need not be played again."""
        groups = {group.uid: group for group in self.groups}
        group = groups.get(group_of(session))
        return group is not None and (group.status != "running" or session in group.sessions)


def load(run_dir: Path, after: int) -> UnfinishedStep | None:
    """Return what is kept of the step after the checkpoint of step ``after``; None if there is nothing."""
    path = _directory(run_dir) / "groups.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    kept = UnfinishedStep(**values | {"groups": [DrawnGroup(**group) for group in values["groups"]]})
    return kept if kept.after == after else None


def count(run_dir: Path, after: int) -> int:
    """Return the number of episodes that are kept of the step after the checkpoint of step ``after``."""
    kept = load(run_dir, after)
    return kept.episodes if kept else 0


def drop(run_dir: Path) -> None:
    """Remove all that is kept."""
    directory = _directory(run_dir)
    (directory / "groups.json").unlink(missing_ok=True)  # first: without it the others do not count
    for path in directory.glob("*"):
        path.unlink()


def write(run_dir: Path, kept: UnfinishedStep, rows: Callable[[DrawnGroup], list[Row]]) -> None:
    """Write what is kept; ``rows`` returns those of a group. A kill in between leaves what was there before."""
    import torch

    directory = _directory(run_dir)
    directory.mkdir(exist_ok=True)
    wanted = {directory / f"{group.uid}.pt": group for group in kept.groups if group.has_rows}
    for path, group in wanted.items():
        with files.replacing(path, synced=True) as new:
            torch.save(rows(group), new)
    files.write(directory / "groups.json", json.dumps(asdict(kept)) + "\n", synced=True)
    for path in set(directory.glob("*.pt")) - set(wanted):
        path.unlink()


def read_rows(run_dir: Path, group: DrawnGroup) -> list[Row]:
    """Return the rows of a group."""
    import torch

    if not group.has_rows:
        return []
    rows = torch.load(_directory(run_dir) / f"{group.uid}.pt", weights_only=False)
    return [row for row in rows if session_of(row[0]) in group.sessions]


class Draws:
    """The draws of a step with a synchronous rollout are what verl's data loader has drawn for it, in order.

    Args:
        run_dir: where episodes are kept.
        step: the step.
        kept: what is left of an earlier start of this step.
        metric: by which verl's buffer compares rewards (``algorithm.filter_groups.metric``).
    """

    def __init__(self, run_dir: Path, step: int, kept: UnfinishedStep | None, metric: str) -> None:
        self.run_dir, self.step, self.metric = run_dir, step, metric
        self.left = list(kept.groups) if kept else []  # groups whose prompts have not been drawn again
        self.drawn: dict[str, int] = {}  # the prompts' places in the data set, by group

    def submit(self, batch: TensorDict) -> TensorDict | None:
        """Hand verl what is kept of the groups of ``batch``, and return the prompts that have episodes to be played, or
        None if none has.

        Their column ``kept`` names the episodes that need not be (``rl.train.agent_loop``).
        """
        import transfer_queue as tq
        from verl.utils import tensordict_utils

        again = [self._again(int(task), "kept" in batch) for task in batch["index"]]
        uids = [old.uid if old else str(uid) for old, uid in zip(again, batch["uid"], strict=True)]
        self.drawn |= zip(uids, map(int, batch["index"]), strict=True)
        if not any(again):
            return batch
        # TransferQueue lists groups in the order in which it first hears of them; the buffer goes by it.
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.step} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        for old in filter(None, again):
            for rows in _by_session(self._rows(old)).values():
                keys, tags, fields = (list(column) for column in zip(*rows, strict=True))
                values = tensordict_utils.list_of_dict_to_tensordict(fields)
                tq.kv_batch_put(keys=keys, partition_id="train", fields=values, tags=tags)
            if old.status != "running":
                status = "finished" if old.status == REPLACED else old.status
                tq.kv_batch_put(keys=[old.uid], partition_id="train", tags=[{"status": status}])
        tensordict_utils.assign_non_tensor_stack(batch, "uid", uids)
        if "kept" in batch:
            done = [" ".join(session.rpartition("_")[2] for session in old.sessions) if old else "" for old in again]
            tensordict_utils.assign_non_tensor_stack(batch, "kept", done)
        played = [number for number, old in enumerate(again) if old is None or old.status == "running"]
        if not played:
            return None
        return tensordict_utils.index_select_tensor_dict(batch, played) if len(played) < len(batch) else batch

    def _again(self, task: int, in_part: bool) -> DrawnGroup | None:
        """Return what is kept of the next group, which plays ``task``. ``in_part``: single episodes can be kept."""
        if self.left and self.left[0].task != task:
            logger.warning("the data have changed: %d groups of the interrupted step are played again", len(self.left))
            self.left = []
        old = self.left.pop(0) if self.left else None
        return old if old and (in_part or old.status != "running") else None

    def _rows(self, group: DrawnGroup) -> list[Row]:
        import torch

        if group.status != REPLACED:
            return read_rows(self.run_dir, group)
        fields = {  # all that verl's buffer reads of a group before it replaces it
            "rm_scores": torch.tensor([group.reward]),
            "extra_fields": {"reward_extra_info": {self.metric: group.reward}},
        }
        return [(f"{session}_0", {"status": "success"}, fields) for session in group.sessions]

    def keep(self, replaced: Mapping[str, tuple[list[str], float]], lost: float, ended: float) -> UnfinishedStep:
        """Write all episodes of the step that have ended, and return what is kept.

        Args:
            replaced: episodes and reward of the groups that were replaced.
            lost, ended: counts of ``rl.train.groups.GroupBuffer``.
        """
        import transfer_queue as tq

        items = tq.kv_list("train").get("train", {})
        rows = {key: tag for key, tag in items.items() if not tag.get("is_prompt")}
        writing = {session_of(key) for key, tag in rows.items() if not tag}  # an episode's tags come last, all at once
        keys: dict[str, list[str]] = {}  # by group
        for key in rows:
            if session_of(key) not in writing:
                keys.setdefault(group_of(session_of(key)), []).append(key)
        groups = []
        for uid, task in self.drawn.items():
            sessions = list(dict.fromkeys(map(session_of, keys.get(uid, []))))
            if uid in replaced:
                groups.append(DrawnGroup(uid, task, REPLACED, *replaced[uid]))
            else:
                status = items[uid]["status"]
                over = status in ("finished", "failure")
                groups.append(DrawnGroup(uid, task, status if over else "running", sessions))
        kept = UnfinishedStep(self.step - 1, [*groups, *self.left], lost, ended)

        def fetch(group: DrawnGroup) -> list[Row]:
            if group.uid not in self.drawn:
                return read_rows(self.run_dir, group)
            return [(key, rows[key], _fields(key)) for key in keys[group.uid]]

        write(self.run_dir, kept, fetch)
        return kept


def _by_session(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(session_of(row[0]), []).append(row)
    return found


def _fields(key: str) -> dict[str, Any]:
    """Return all columns of a row in TransferQueue, as the agent loop's worker has put them."""
    import torch
    import transfer_queue as tq
    from tensordict import NonTensorData

    def only(column: Any) -> Any:
        if isinstance(column, torch.Tensor):
            return column.unbind(0)[0].clone()  # a view would be saved with all that it is a view of
        (value,) = column
        return value.data if isinstance(value, NonTensorData) else value

    data = tq.kv_batch_get(keys=[key], partition_id="train")
    return {str(name): only(data[name]) for name in data.keys()}  # noqa: SIM118  a TensorDict iterates over its rows


def _directory(run_dir: Path) -> Path:
    return run_dir / "unfinished"
