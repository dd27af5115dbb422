from __future__ import annotations

import statistics
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.plan.schedules import MODES, ScheduleSetting, main, play

SIZES = st.builds(
    ScheduleSetting,
    median=st.floats(1, 60),
    tail=st.floats(1.1, 6),
    groups=st.sampled_from([4, 8]),
    n=st.integers(1, 4),
    room=st.integers(4, 64),
    training=st.floats(0, 30),
    ahead=st.integers(0, 2),
    limit=st.integers(1, 4),
    updates=st.sampled_from([1, 2, 4]),
)


@settings(max_examples=40)
@given(st.sampled_from(MODES), SIZES, st.integers(0, 3))
def test_what_holds_for_every_schedule(mode: str, setting: ScheduleSetting, seed: int) -> None:
    """No step is shorter than its training, no group older than the limit, and no GPU is used twice."""
    found = play(mode, setting, 6, seed)
    assert len(found.minutes) == len(found.lengths) == 6 and len(found.lags) == 6 * setting.groups
    assert min(found.minutes) >= setting.training and -1e-6 <= found.idle <= 1
    assert min(found.lags) >= 0 and max(found.lags) < (1 if mode == "sync" else setting.limit)
    assert all(len(lengths) == setting.groups * setting.n for lengths in found.lengths)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_the_limit_is_verls_own(limit: int) -> None:
    """verl counts the versions that a group may see, the first included: a row's lag is less than its threshold."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    buffer: Any = ReplayBufferAsync.__new__(ReplayBufferAsync)
    buffer.max_off_policy_threshold, buffer.max_off_policy_strategy = limit, "drop"
    buffer.prompt_global_steps = {"train": {f"{lag}": 10 - lag for lag in range(6)}}
    buffer.finished_keys = {"train": set(buffer.prompt_global_steps["train"])}
    assert buffer._stale_terminal_keys(10, "train") == {f"{lag}" for lag in range(limit, 6)}
    setting = ScheduleSetting(groups=4, n=2, room=8, ahead=3, limit=limit)
    assert max(play("colocate_async", setting, 20).lags) == min(limit - 1, 3)


def test_a_synchronous_step_waits_for_its_longest_episode() -> None:
    found = play("sync", ScheduleSetting(room=10_000, training=7), 5)
    assert found.minutes == pytest.approx([max(lengths) + 7 for lengths in found.lengths])
    # With half the room, all are slower.
    assert statistics.fmean(play("sync", ScheduleSetting(room=64, training=7), 5).minutes) > statistics.fmean(
        found.minutes
    )


def test_asynchronous_modes_begin_with_short_episodes_and_wait_less() -> None:
    sync, colocated = (play(mode, ScheduleSetting(), 20) for mode in ("sync", "colocate_async"))
    means = [statistics.fmean(lengths) for lengths in colocated.lengths]
    assert means[0] < 0.95 * statistics.fmean(means[4:])
    assert sum(colocated.minutes) < 0.6 * sum(sync.minutes) and colocated.idle < sync.idle


def test_few_steps_are_printed_and_groups_that_updates_do_not_divide_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["schedules", "--steps", "2", "--groups", "4"])
    main()
    assert capsys.readouterr().out.count("| `") == len(MODES)
    monkeypatch.setattr(sys, "argv", ["schedules", "--groups", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "--groups 2 is no multiple of --updates 4" in capsys.readouterr().err
