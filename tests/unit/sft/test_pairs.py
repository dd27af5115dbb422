"""This module tests preference pairs: two replies to the same tokens, in a resolved and an unresolved episode of a
task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from rl.quickstart.policy import make_tokenizer
from rl.sft.episodes import pairs_of, parting, write_pairs
from rl.sft.other import run_dpo
from rl.sft.trainer import Passes
from rl.traces.rows import RowsError
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import VERSION, Record, node_records, row_records
from tests.check_kit import composed
from tests.kit import CharTokenizer, QueueEngine, char_policy, empty_record
from tests.unit.data.test_select import write


async def talk(name: str, task: str, resolved: bool, *said: str, first: str = "hi") -> Record:
    """An episode in which the policy says this; each reply is answered by its number."""
    session = Session(name, char_policy(QueueEngine(*said)))
    messages: list[Any] = [{"role": "user", "content": first}]
    for number in range(len(said)):
        request = json.dumps({"model": "policy", "messages": messages}).encode()
        node = await session.prepare(decode_request(request), retry=False).reply()
        node.delivered = True
        messages += [
            {"role": "assistant", "content": list(node.reply.blocks)},
            {"role": "user", "content": str(number)},
        ]
    outcome = {"outcome": "resolved" if resolved else "unresolved", "reason": None if resolved else "tests_failed"}
    verdict = {**outcome, "reward": float(resolved), "detail": "", "flags": []}
    nodes, rows = node_records(session.tree), row_records(session.tree.sequences())
    return empty_record(version=VERSION, episode=name, task=task, nodes=nodes, rows=rows, verdict=verdict)


def texts(pair: Any) -> list[str]:
    return [CharTokenizer().decode(ids) for ids in pair]


async def test_two_episodes_part_in_a_reply_to_the_same_tokens() -> None:
    good = await talk("good", "t", True, "look", "right", "done")
    bad = await talk("bad", "t", False, "look", "wrong", "done")
    pair = parting(good, bad)
    assert pair is not None
    prompt, chosen, rejected = texts(pair)
    assert "look" in prompt and "right" not in prompt and chosen.startswith("right") and rejected.startswith("wrong")
    (row,) = good.rows
    ids = b"".join(node.ids for node in good.nodes)  # one thread
    assert ids.startswith(b"".join(token.to_bytes(4, "little") for token in [*pair[0], *pair[1]])) and row.nodes
    assert parting(good, await talk("same", "t", False, "look", "right", "done")) is None
    assert parting(good, await talk("other", "t", False, "look", "wrong", first="hello")) is None  # the context differs
    untrained = msgspec.structs.replace(bad, rows=[])
    assert parting(good, untrained) is None


async def test_each_episode_is_in_one_pair_and_pairs_are_of_a_task(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run",
        await talk("a", "t1", True, "right"),
        await talk("b", "t1", True, "right"),
        await talk("c", "t1", False, "wrong"),
        await talk("d", "t1", False, "bad"),
        await talk("e", "t2", False, "worse"),
        await talk("f", "t3", True, "fine"),
    )
    (first, second) = (texts(pair)[1:] for pair in pairs_of([run]))
    assert first[0].startswith("right") and first[1].startswith("wrong")
    assert second[0].startswith("right") and second[1].startswith("bad")
    assert write_pairs([run], tmp_path / "pairs.parquet", max_length=10**6) == (2, 0)
    table = pyarrow.parquet.read_table(tmp_path / "pairs.parquet")
    assert table.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"] and len(table) == 2
    with pytest.raises(RowsError, match=r"^2 pairs are longer than 3 tokens: DPO needs"):
        write_pairs([run], tmp_path / "none.parquet", max_length=3)
    assert not (tmp_path / "none.parquet").exists()


async def test_pairs_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    class Other:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "another vocabulary"

    run = write(tmp_path / "run", await talk("a", "t1", True, "right"), await talk("c", "t1", False, "wrong"))
    other: Any = Other()
    with pytest.raises(RowsError, match="which the policy's tokenizer reads as something else"):
        write_pairs([run], tmp_path / "pairs.parquet", 10**6, other)


async def test_without_a_pair_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    run = write(tmp_path / "run", await talk("a", "t1", True, "right"), await talk("b", "t2", False, "wrong"))
    config, passes = composed("+experiment=quickstart"), Passes(1, 1e-4, 1, 1000, 1)
    make_tokenizer().save_pretrained(model := tmp_path / "model")
    with pytest.raises(RowsError, match="there is no pair: DPO needs resolved and unresolved episodes of a task"):
        run_dpo(config, str(model), [run], tmp_path, passes, lambda *_: None)
