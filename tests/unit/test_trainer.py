"""Row weights: an episode counts once, however many rows it has."""

from hypothesis import given
from hypothesis import strategies as st

from rl.trainer import row_weights


def test_rows_share_their_episode_by_tokens():
    weights = row_weights(["a", "a", "b", "pad"], [30, 10, 5, 0])
    assert weights == [0.75, 0.25, 1.0, 0.0]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 500)), min_size=1))
def test_weights_of_an_episode_sum_to_one(rows):
    sessions, tokens = [list(column) for column in zip(*rows, strict=True)]
    weights = row_weights(sessions, tokens)
    for session in set(sessions):
        total = sum(w for s, w in zip(sessions, weights, strict=True) if s == session)
        sampled = sum(t for s, t in zip(sessions, tokens, strict=True) if s == session)
        assert abs(total - (1.0 if sampled else 0.0)) < 1e-9
