"""The stand-alone proxy records its sessions as training does: what reads a run's records reads them, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rl.export import main as export
from rl.sft.episodes import write_rows
from rl.view.command import main as view
from rl.view.terminal import main as terminal
from rollout import audit
from rollout.proxy.standalone import ProxyOptions, StandAlone
from rollout.recording import Recording
from rollout.records import Record
from rollout.records.reading import Reader
from tests.kit import CallReading, CharTokenizer, QueueEngine, char_policy

CALL = '[[Bash {"command": "ls"}]]'
TOOL = {"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
SESSION = "0b5fca2e-6a4b-4b7e-9d6c-8a51b0f1c0de"
Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    proxies = list[StandAlone]()

    async def make(*replies: str, **options: Any) -> StandAlone:
        recording = Recording(tmp_path / "run", "model")
        proxy = StandAlone(ProxyOptions("http://127.0.0.1:9", "model", "calls", **options), keep=recording.keep)
        proxy.policy = char_policy(QueueEngine(*replies))
        await proxy.start()
        proxies.append(proxy)
        return proxy

    yield make
    for proxy in proxies:
        await proxy.stop()


async def talk(proxy: StandAlone, session: str, *said: str) -> None:
    """Say something in turn, as Claude Code does: tool results after calls, and the conversation whole each time."""
    headers = {"x-api-key": "t", "X-Claude-Code-Session-Id": session}
    messages = list[dict[str, Any]]()
    async with aiohttp.ClientSession(headers=headers) as http:
        for text in said:
            called = [b for b in messages[-1]["content"] if b["type"] == "tool_use"] if messages else []
            results = [{"type": "tool_result", "tool_use_id": b["id"], "content": text} for b in called]
            messages.append({"role": "user", "content": results or text})
            body = {"model": "m", "max_tokens": 100, "messages": messages, "tools": [TOOL]}
            async with http.post(f"http://127.0.0.1:{proxy.port}/v1/messages", json=body) as response:
                assert response.status == 200
                messages.append({"role": "assistant", "content": (await response.json())["content"]})


def read(run: Path) -> list[Record]:
    return list(Reader(run)) if run.is_dir() else []


async def test_a_session_is_a_sealed_record_that_the_audit_and_exports_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = await start(CALL, "done", "other")
    await talk(proxy, SESSION, "list the files", "a.py")
    await talk(proxy, "not a/name", "hello")
    assert not read(tmp_path / "run")  # they may go on
    await proxy.stop()
    first, second = sorted(read(tmp_path / "run"), key=lambda record: record.started)
    assert (first.task, first.agent["turns"], first.verdict["reason"]) == (SESSION, 2, "not_graded")
    assert "/" not in second.task and first.seal and len(first.rows) == 1 and first.rows[0].response_tokens > 10
    monkeypatch.setattr(audit, "tokenizer_of", lambda model: CharTokenizer())
    monkeypatch.setattr(audit, "FormatReading", lambda *_: CallReading())
    assert audit.main([str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert "ok: 2 episodes, 3 replies, 2 rows" in told.out and not told.err
    assert terminal([str(tmp_path / "run")]) == 0 and SESSION in capsys.readouterr().out
    assert await asyncio.to_thread(view, [str(tmp_path / "run"), "--bundle", str(tmp_path / "pages")]) == 0
    pages = [path.read_text() for path in (tmp_path / "pages").rglob("*.html")]
    assert any("list the files" in page for page in pages) and any(SESSION in page for page in pages)
    counts = write_rows([tmp_path / "run"], tmp_path / "rows.parquet", max_length=10**6, tokenizer=CharTokenizer())
    assert (counts.episodes, counts.rows, counts.without) == (2, 2, 0)
    assert export(["messages", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0


async def test_a_client_that_comes_back_has_a_second_record(start: Start, tmp_path: Path) -> None:
    proxy = await start("one", "two", idle_s=0.1)
    for _ in range(2):
        await talk(proxy, SESSION, "hello")
        async with asyncio.timeout(60):
            while proxy.sessions or proxy._keeping:
                await asyncio.sleep(0.02)
    records = read(tmp_path / "run")
    assert [record.task for record in records] == [SESSION] * 2 and len({record.episode for record in records}) == 2


async def test_a_session_without_a_reply_has_no_record(start: Start, tmp_path: Path) -> None:
    proxy = await start()
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with http.post(f"http://127.0.0.1:{proxy.port}/v1/messages/count_tokens", json=body) as response:
            assert response.status == 200
    await proxy.stop()
    assert read(tmp_path / "run") == []


async def test_a_full_disk_is_a_line_of_log_and_not_half_a_record(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start("one", "two", max_sessions=1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        await talk(proxy, "a", "hello")
        await talk(proxy, "b", "hello")  # which closes the first one
        await asyncio.gather(*proxy._keeping)
    assert "session a is not recorded: [Errno 28] No space left on device" in caplog.text
    await proxy.stop()
    reader = Reader(tmp_path / "run")
    assert [record.task for record in reader] == ["b"] and not reader.torn


async def test_a_bug_in_one_session_costs_only_its_record(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start("one", "two")
    keep = proxy._keep

    def kept(session: Any) -> None:
        keep(session) if session.episode_id == "b" else 1 / 0

    proxy._keep = kept
    await talk(proxy, "a", "hello")
    await talk(proxy, "b", "hello")
    await proxy.stop()
    assert [record.task for record in read(tmp_path / "run")] == ["b"]
    assert "session a is not recorded" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_recording_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    """So none stays if the port is in use."""
    Recording(tmp_path, "model").close()
    assert not list((tmp_path / "episodes").iterdir())
