"""This module tests ``python -m rl.evaluate`` with the real Claude Code: an endpoint with a known outcome, and random
weights of a Qwen3.5 behind the vLLM server that it starts. The first is killed with -9 in the middle and continued;
that a server ends with a program that is killed is shown in test_sft_rounds.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl.quickstart.policy import make_policy
from rl.quickstart.tasks import make_tasks
from rollout import audit
from rollout.proxy.engine import SAMPLED
from rollout.proxy.server import ProxyServer
from rollout.records.reading import Reader
from tests.integration.claude_kit import scripted
from tests.integration.process_kit import read_until
from tests.integration.programs_kit import AGENT, gold, kill_after, start
from tests.integration.vllm_kit import ONE_PROCESS, UNCOMPILED
from tests.kit import char_policy


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=4, n_train=4, n_heldout=1)
    return out / "train.parquet"


def checked(out: Path, text: str, tasks: int, samples: int) -> dict[str, Any]:
    """Check that each episode was graded once, and return the results."""
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    graded = Counter((line["task"], line["sample"]) for line in lines if not line["infra"])
    assert len(graded) == tasks * samples and set(graded.values()) == {1}, text
    assert Counter(record.episode for record in Reader(out)) == Counter(line["episode"] for line in lines)
    return json.loads((out / "results.json").read_text())


@pytest.mark.claude
async def test_an_endpoint_that_solves_everything(tasks_file: Path, tmp_path: Path) -> None:
    endpoint = ProxyServer()
    await endpoint.start()
    session = await endpoint.open_session("gold", char_policy(scripted(gold)))
    out = tmp_path / "out"
    what = [f"endpoint=http://127.0.0.1:{endpoint.port}", "protocol=messages", "model=gold", "key_env=GOLD"]
    what += [f"tasks={tasks_file}", f"out={out}", "samples=2", *AGENT]
    key = {"GOLD": session.secret}
    try:
        await asyncio.to_thread(kill_after, "2/8 ", *what, **key)
        sockets = Path((out / "socket_dir").read_text())
        assert sockets.is_dir()
        played = len(list(Reader(out)))
        assert 2 <= played < 8
        resumed = start(*what, **key)
        text, _ = await asyncio.to_thread(resumed.communicate)
        assert resumed.returncode == 0, text
        assert not sockets.exists() and not (out / "socket_dir").exists()
        assert f"{8 - played} episodes to play, {played} are there" in text
        found = checked(out, text, 4, 2)
        assert found["complete"] and found["pass_at_1"]["value"] == found["pass_at_k"]["2"]["value"] == 1.0
        assert found["pass_at_1"]["low"] < 1.0 and found["infra"] == {"episodes": 0, "attempts": {}}
        assert found["spread"]["calls"]["p50"] == 3 and found["spread"]["tokens_sampled"]["sum"] > 8 * 10
        (preds, second) = (json.loads((out / f"preds{number}.json").read_text()) for number in ("", ".1"))
        assert len(preds) == len(second) == 4 and all("+    return " in one["model_patch"] for one in preds)
        assert not any(session.secret.encode() in file.read_bytes() for file in out.rglob("*") if file.is_file())
        assert audit.main([str(out)]) == 0
        # With more samples it goes on; a batch system's SIGTERM ends it in order.
        more = start(*what, "samples=9", **key)
        await asyncio.to_thread(read_until, more, "playing")
        more.terminate()
        text, _ = await asyncio.to_thread(more.communicate)
        assert more.returncode == 130 and "\ninterrupted\ncontinue  " in f"\n{text}", text
        assert not json.loads((out / "results.json").read_text())["complete"]
        # Nothing is left to do, and other settings are another evaluation.
        again = start(*what, **key)
        text, _ = await asyncio.to_thread(again.communicate)
        assert again.returncode == 0 and "0 episodes to play, 8 are there" in text
        other = start(*what, "agent.max_turns=5", **key)
        text, _ = await asyncio.to_thread(other.communicate)
        assert other.returncode == 2 and "agent.max_turns is 30 there and 5 here" in text.splitlines()[-1]
        # In the middle the endpoint stops accepting the key: episodes are lost, but none counts as unresolved.
        lost = start(*what, "samples=9", "episode.infra_retries=0", **key)
        await asyncio.to_thread(read_until, lost, "playing")
        await endpoint.close_session(session)
        text, _ = await asyncio.to_thread(lost.communicate)
        assert lost.returncode == 1 and "stopped: the last 9 episodes had no verdict" in text, text
        found = json.loads((out / "results.json").read_text())
        assert found["pass_at_1"]["value"] == 1.0 and found["infra"]["attempts"]["engine_failed"] >= 9
    finally:
        await endpoint.stop()


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_policy_behind_its_own_vllm_server(
    tasks_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_policy(model, seed=2, head_dim=128, hybrid=True)  # vLLM's module of it asks for torchvision
    what = [f"policy={model}", f"tasks={tasks_file}", f"out={out}", *AGENT, "agent.max_turns=2", "proxy.max_tokens=16"]
    what += ["max_context=4096", "serve.dtype=bfloat16", "serve.enforce_eager=true", "samples=2"]
    what += [f"serve.args=[--language-model-only,{','.join(ONE_PROCESS)}]"]
    process = start(*what, **UNCOMPILED)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    found = checked(out, text, 4, 2)
    assert found["complete"] and found["infra"]["episodes"] == 0
    # Random weights resolve nothing.
    assert found["pass_at_1"]["value"] == 0.0 and 0.3 < found["pass_at_1"]["high"] < 0.7
    assert found["spread"]["tokens_sampled"]["sum"] > 0 and "rl.evaluate compare" in text
    assert {node.logprobs_of for record in Reader(out) for node in record.nodes if node.logprobs} == {SAMPLED}
    assert audit.main([str(out)]) == 0
    assert "ok: 8 episodes" in capsys.readouterr().out
    same = start("compare", str(out), str(out))
    text, _ = same.communicate()
    assert same.returncode == 0 and "p = 1" in text
