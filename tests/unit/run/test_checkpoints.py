"""A run resumes from complete checkpoints only, whatever a killed process or a full disk has left."""

from pathlib import Path

import pytest

from rl.run import checkpoints


def saved(directory: Path, *steps: int, sealed: bool = True) -> None:
    for step in steps:
        actor = directory / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model.pt").write_bytes(b"weights")
        (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
        if sealed:
            checkpoints.seal(directory, step)


def steps(directory: Path) -> set[str]:
    return {place.name for place in directory.glob("global_step_*")}


def test_a_run_without_checkpoints_starts_at_step_0(tmp_path):
    for directory in (tmp_path / "missing", tmp_path):
        assert checkpoints.newest(directory) == 0 and checkpoints.tidy(directory, 2) == []


@pytest.mark.parametrize("tracker", ["3", "4", "", "4\n", None])
def test_an_incomplete_checkpoint_is_removed(tmp_path, tracker):
    saved(tmp_path, 2, 3)
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_4" / "data.pt").touch()
    file = tmp_path / checkpoints.TRACKER
    file.unlink() if tracker is None else file.write_text(tracker)
    written_by_verl_at_the_end = (tracker or "").strip() == "4"
    assert checkpoints.newest(tmp_path) == (4 if written_by_verl_at_the_end else 3)
    assert checkpoints.tidy(tmp_path, None) == ([] if written_by_verl_at_the_end else [4])
    assert file.read_text() == str(checkpoints.newest(tmp_path))
    assert steps(tmp_path) == {f"global_step_{n}" for n in ((2, 3, 4) if written_by_verl_at_the_end else (2, 3))}


def test_after_an_incomplete_first_checkpoint_the_run_starts_at_step_0(tmp_path):
    saved(tmp_path, 1, sealed=False)
    (tmp_path / checkpoints.TRACKER).write_text("")
    assert checkpoints.tidy(tmp_path, 2) == [1] and checkpoints.newest(tmp_path) == 0
    assert not (tmp_path / checkpoints.TRACKER).exists() and not steps(tmp_path)


def test_old_checkpoints_are_removed_also_those_of_an_earlier_start(tmp_path):
    saved(tmp_path, 1, 2, 3, 10)
    (tmp_path / ".global_step_0").mkdir()  # killed while it was removed
    assert checkpoints.tidy(tmp_path, 2) == [] and not (tmp_path / ".global_step_0").exists()
    assert steps(tmp_path) == {"global_step_3", "global_step_10"}
    checkpoints.drop_old(tmp_path, None)
    assert checkpoints.newest(tmp_path) == 10 and len(steps(tmp_path)) == 2
