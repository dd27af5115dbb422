"""This module tests teachers: the command with stand-ins for both formats, which are busy, hang, lie and die; and its
parts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.teachers.arguments import teacher_of
from rl.teachers.families import family_of
from rl.teachers.outcome import majority
from rl.traces.ingest.agreement import calls_of
from rl.traces.ingest.asking import Budget
from rl.traces.ingest.endpoints import BusyError, DeadError, Endpoint, RefusedError
from rl.traces.ingest.states import Message
from tests.endpoint_kit import KEY, StandIn, chat_reply, standing_in
from tests.kit import full_at
from tests.unit.traces.test_ingest_uses import EDIT, ROOT, TALK, state, use, write_states

READ = use("Read", 3, file_path="b.py")


def command(tmp_path: Path, *what: str) -> list[str]:
    return [sys.executable, "-m", "rl.teachers", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "out"), *what]


def environment(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "", "HOME": str(tmp_path), "THE_KEY": KEY}


async def run(tmp_path: Path, *what: str, full: int = 1 << 40) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *full_at(full, command(tmp_path, *what)),
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


def recorded(tmp_path: Path, count: int = 8) -> None:
    found = [
        state(TALK, [{"type": "thinking", "thinking": "hm"}, EDIT], f"s{n}", system=f"number {n};")
        for n in range(count)
    ]
    write_states(tmp_path / "s.jsonl", found)


def rows(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]


def spec(stand_in: StandIn, name: str, *more: str) -> list[str]:
    return ["--teacher", ",".join([f"name={name}", f"url={stand_in.url}", f"model={name}-7b", *more])]


def even(text: str) -> list[Message]:
    """Reply as the student in states with an even number, and otherwise read another file."""
    agrees = any(f"number {n};" in text for n in range(0, 100, 2))
    return [{"type": "text", "text": "So."}, EDIT if agrees else READ]


async def test_agreement_gives_pairs_and_rows_to_distil(tmp_path: Path) -> None:
    recorded(tmp_path)
    busy = StandIn(even, mood=lambda n: (429, {"Retry-After": "0"}, "slow down") if n in (2, 5) else None)
    odd = StandIn(
        lambda text: [{"type": "text", "text": "What?"}], mood=lambda n: (200, {}, "{bad") if n == 1 else None
    )
    async with standing_in(busy), standing_in(StandIn(even)) as plain, standing_in(odd):
        prices = ["price_in=3", "price_out=15", "key_env=THE_KEY"]
        what = [*spec(busy, "qwen", *prices), *spec(plain, "glm", "protocol=messages", *prices), *spec(odd, "kimi")]
        status, said = await run(tmp_path, *what)
        assert status == 2 and "give --max-cost" in said and not busy.heard and not (tmp_path / "out").exists()
        status, said = await run(tmp_path, *what, "--max-cost", "5")
        assert status == 0, said
        assert (len(busy.heard), len(plain.heard), len(odd.heard)) == (10, 8, 9)
        assert busy.keys == {f"Bearer {KEY}"} and plain.keys == {f"Bearer {KEY}"} and odd.keys == {None}
        # Two of three agree: on the student's reply in every other state.
        distilled, pairs = rows(tmp_path, "distill.jsonl"), rows(tmp_path, "pairs.jsonl")
        assert [row["agrees_with_student"] for row in distilled] == [True, False] * 4
        assert [row["state_id"] for row in pairs] == ["s1", "s3", "s5", "s7"]
        for row in pairs:
            (call,) = row["chosen"][0]["tool_calls"]
            assert call["function"] == {"name": "Read", "arguments": {"file_path": "b.py"}}
            assert row["rejected"][0]["tool_calls"][0]["function"]["name"] == "Edit"
            assert "reasoning_content" not in row["rejected"][0] and row["prompt"][0]["role"] == "system"
            assert row["teachers"] == ["qwen", "glm"] and row["answered"] == 3
        assert all(row["messages"][-1]["content"] == "So." for row in distilled)
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["states"] == {"teachers agree with the student": 4, "teachers agree on something else": 4}
        assert report["cost"] == pytest.approx(2 * 8 * (100 * 3 + 10 * 15) / 1e6)
        one = report["teachers"]["qwen"]
        assert one["same_call"]["share"] == 0.5 and 0 < one["p50_s"] <= one["p95_s"]
        # The same again asks nobody.
        status, said = await run(tmp_path, *what, "--max-cost", "5")
        assert status == 0 and "0 answers to ask for, 24 are there" in said and len(plain.heard) == 8
        kept = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
        assert KEY.encode() not in kept and KEY not in said
        # Other questions have another directory.
        status, said = await run(tmp_path, *spec(odd, "kimi", "temperature=1"))
        assert status == 2 and "answers to other questions" in said


async def test_a_teacher_words_statements_and_what_tells_too_much_is_not_taken(tmp_path: Path) -> None:
    """The teacher sees the statement and nothing else of a task. A busy endpoint is asked again, answers are kept."""
    old = "`f()` gives a wrong result.\n\n```python\nf(1)\n```\n\nObserved: returns `[1]`\nExpected: returns `[2]`"
    gold = "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-    return [number]\n+    return [number + 1]\n"
    told = ["number 0;", "number 1;", "number 2;", "number 3;", "number 4;"]
    rows = [
        {
            "instance_id": f"t{n}", "image": f"dir:repos/t{n}", "repo": "pypi/f", "version": "1",
            "base_commit": "0" * 40, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "patch": gold,
            "eval_script": ": '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n",
            "problem_statement": old, "FAIL_TO_PASS": '["tests/test_f.py::test_plus"]', "PASS_TO_PASS": "[]",
            "statement_2": f"{told[n]} {old}",
        }
        for n in range(5)
    ]  # fmt: skip
    (tmp_path / "in").mkdir()
    source, out = tmp_path / "in" / "made.parquet", tmp_path / "out" / "restated.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    block = "```python\nf(1)\n```"
    replies = {
        "number 0;": f"I call f:\n\n{block}\n\nand get `[1]`, not `[2]`. `f()` is number 0;",
        "number 1;": f"{block} `f()` `[1]` `[2]`, as test_plus says",
        "number 2;": f"`f()` `[1]` `[2]`: write ```\nreturn [number + 1]\n``` {block}",
        "number 3;": f"`f()` gives `[1]`:\n{block}",
        "number 4;": "`f()` `[1]` `[2]`\n```python\nf(2)\n```",
    }

    def reply(text: str) -> list[Message]:
        assert "test_f" not in text and "number + 1" not in text and "pypi" not in text
        return [{"type": "text", "text": next(said for word, said in replies.items() if word in text)}]

    stand_in = StandIn(reply, mood=lambda n: (503, {"Retry-After": "0"}, "no") if n == 2 else None)
    async with standing_in(stand_in):
        what = ["--out", str(out), "--teacher", f"name=t,url={stand_in.url},model=words-7b,key_env=THE_KEY"]
        arguments = [sys.executable, "-m", "rl.teachers.restate", str(source), *what]
        for asked in (6, 6):  # the second time nobody is asked
            done = await asyncio.to_thread(
                subprocess.run, arguments, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True
            )
            assert (done.returncode, len(stand_in.heard)) == (0, asked), done.stdout + done.stderr
    assert stand_in.keys == {f"Bearer {KEY}"}
    kept = pyarrow.parquet.read_table(out).to_pylist()
    assert kept[0]["problem_statement"] == replies["number 0;"] and kept[0]["stated_by"] == "words-7b"
    assert [row["problem_statement"] for row in kept[1:]] == [row["statement_2"] for row in rows[1:]]
    assert {row["stated_by"] for row in kept[1:]} == {""}
    assert [task.snapshot for task in load_tasks(out)] == [task.snapshot for task in load_tasks(source)]
    for why in ("1  statements replaced", "2  kept as it was: tells the answer", "lost [2]", "other code"):
        assert why in done.stdout, done.stdout
    source.write_bytes(b"x")
    done = await asyncio.to_thread(
        subprocess.run, arguments, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1


async def test_the_same_family_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    found = [state(TALK, [EDIT], f"s{n}", system=f"number {n};") for n in range(4)]
    for one, model in zip(found, ["claude-opus-5", "claude-sonnet-5", "Qwen3-4B", ""], strict=True):
        one.source_model = model
    write_states(tmp_path / "s.jsonl", found)
    async with standing_in(StandIn(even)) as one:
        what = ["--teacher", f"name=big,url={one.url},model=anthropic/claude-opus-9"]
        status, said = await run(tmp_path, *what)
        assert status == 0 and len(one.heard) == 2, said
        assert "big is of the family claude, as the model of 2 states: it is left out there" in said
        assert "1 state doesn't name its model" in said
        status, said = await run(tmp_path, *what, "--same-family")
        assert status == 0 and len(one.heard) == 4, said


async def test_a_dead_endpoint_is_one_line_and_the_others_go_on(tmp_path: Path) -> None:
    recorded(tmp_path)
    locked = StandIn(even, mood=lambda n: (401, {}, "bad key"))
    async with standing_in(locked), standing_in(StandIn(even)) as good, standing_in(StandIn(even)) as gone:
        url = gone.url
    async with standing_in(locked), standing_in(StandIn(even)) as good:
        gone.url = url
        what = [*spec(locked, "qwen", "concurrency=1"), *spec(gone, "kimi"), *spec(good, "glm")]
        status, said = await run(tmp_path, *what)
        assert status == 1 and len(good.heard) == 8 and len(locked.heard) == 1, said
        lines = [line for line in said.splitlines() if "given up" in line]
        assert len(lines) == 2 and any("status 401: bad key" in line for line in lines), said
        assert len(rows(tmp_path, "distill.jsonl")) == 8


async def test_a_full_disk_loses_no_answer_and_the_same_command_goes_on(tmp_path: Path) -> None:
    recorded(tmp_path, 12)
    async with standing_in(StandIn(even)) as one:
        status, said = await run(tmp_path, *spec(one, "glm", "concurrency=1"), full=3000)
        assert status == 1 and said.splitlines()[-1].startswith("teachers: [Errno 27] File too large"), said
        kept = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
        asked = len(one.heard)
        assert 1 <= asked < 12
        status, said = await run(tmp_path, *spec(one, "glm", "concurrency=1"))
        assert status == 0 and len(rows(tmp_path, "distill.jsonl")) == 12, said
        assert len(one.heard) <= 12 + 1, "only the answer that did not fit is asked for again"
        assert (tmp_path / "out" / "answers.jsonl").read_text().splitlines()[: len(kept) - 1] == kept[:-1]
    # What is written at the end is whole or not there: here it is larger than all that was there before.
    for name in ("distill.jsonl", "pairs.jsonl", "report.json"):
        (tmp_path / "out" / name).unlink()
    async with standing_in(StandIn(even)) as again:
        status, said = await run(tmp_path, *spec(one, "glm", "concurrency=1"), full=4000)
        assert status == 1 and again.heard == [] and said.splitlines()[-1].startswith("teachers: "), said
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"answers.jsonl", "asked.json"}


async def test_the_cap_is_never_passed_and_a_higher_one_goes_on(tmp_path: Path) -> None:
    recorded(tmp_path)
    async with standing_in(StandIn(even)) as one:
        what = spec(one, "qwen", "price_in=0", "price_out=1000", "max_tokens=10", "concurrency=3")  # a cent each
        status, said = await run(tmp_path, *what, "--max-cost", "0.055")
        assert status == 1 and "the cap of $0.055 is reached" in said and len(one.heard) == 5, said
        assert "cost: $0.0500" in said
        status, said = await run(tmp_path, *what, "--max-cost", "1")
        assert status == 0 and len(one.heard) == 8, said


async def test_kill_9_loses_only_what_is_under_way(tmp_path: Path) -> None:
    recorded(tmp_path, count=30)
    one = StandIn(even, hangs=frozenset({13, 14}))
    async with standing_in(one):
        what = spec(one, "qwen", "concurrency=2")
        process = subprocess.Popen(
            command(tmp_path, *what), cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL
        )
        while len(one.heard) < 14:
            assert process.poll() is None
            await asyncio.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        kept = rows(tmp_path, "answers.jsonl")
        assert len(kept) == 12 and one.most == 2
        with open(tmp_path / "out" / "answers.jsonl", "a") as journal:
            journal.write('{"state": "s9')  # a line that a kill has cut
        status, said = await run(tmp_path, *what)
        assert status == 0 and "18 answers to ask for, 12 are there" in said, said
        asked = Counter(line["state"] for line in rows(tmp_path, "answers.jsonl"))
        assert len(asked) == 30 and set(asked.values()) == {1} and len(one.heard) == 32


def endpoint(stand_in: StandIn, **more: Any) -> Endpoint:
    return Endpoint("t", stand_in.url, "m", pause=0.001, **more)


async def ask(one: Endpoint) -> Message:
    async with one.connected() as client:
        return (await one.ask(client, state(TALK, [EDIT]))).action


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_what_an_endpoint_can_do_wrong(protocol: str) -> None:
    body = {"model": "m", "messages": []}
    empty = json.dumps({"choices": []} if protocol == "chat" else chat_reply(1, body, []))
    wrong = [(500, {}, ""), (529, {}, "overloaded"), (200, {}, "{bad"), (200, {}, empty)]
    one = StandIn(even, mood=lambda n: wrong[n - 1] if n <= len(wrong) else None)
    async with standing_in(one):
        assert (await ask(endpoint(one, protocol=protocol)))["content"][0]["text"] == "So."
    for status, kind, times in (
        (400, RefusedError, 1),
        (413, RefusedError, 1),
        (403, DeadError, 1),
        (503, BusyError, 6),
    ):
        one = StandIn(even, mood=lambda n, status=status: (status, {}, "no\nway"))
        async with standing_in(one):
            with pytest.raises(kind, match=f"status {status}: no way"):
                await ask(endpoint(one, protocol=protocol))
            assert len(one.heard) == times
    one = StandIn(even, hangs=frozenset({1}))
    async with standing_in(one):
        assert (await ask(endpoint(one, protocol=protocol, patience_s=0.3)))["content"][1] and len(one.heard) == 2


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("key", [None, KEY])
async def test_nothing_of_the_environment_reaches_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, key: str | None
) -> None:
    """The user's environment has keys and addresses of other services, and an endpoint is sent none of them."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login leak password leak")
    leaks = {
        f"{vendor}_{name}": "leak"
        for vendor in ("OPENAI", "ANTHROPIC")
        for name in (
            "API_KEY", "ADMIN_KEY", "AUTH_TOKEN", "ORG_ID", "PROJECT_ID", "PROFILE", "ORGANIZATION_ID",
            "IDENTITY_TOKEN", "FEDERATION_RULE_ID", "WEBHOOK_SECRET", "WEBHOOK_SIGNING_KEY",
        )
    }  # fmt: skip
    for vendor in ("OPENAI", "ANTHROPIC"):
        leaks[f"{vendor}_BASE_URL"] = "http://127.0.0.1:9/leak"
        leaks[f"{vendor}_CUSTOM_HEADERS"] = "x-leak: leak\nauthorization: leak\nAuthorization: leak\nX-Api-Key: leak"
    leaks |= dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "http://leak:leak@127.0.0.1:9")
    leaks["NETRC"] = str(tmp_path / "netrc")
    for name, value in leaks.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    async with standing_in(StandIn(even)) as one:
        assert (await ask(endpoint(one, protocol=protocol, key=key)))["content"]
    (headers,) = one.headers
    assert "leak" not in json.dumps([headers, one.heard]).lower()
    assert headers.get("authorization") == (f"Bearer {key}" if key else None) and "x-api-key" not in headers
    assert not [name for name in headers if name.startswith("openai-") or name == "traceparent"]
    assert dict(os.environ) == before


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_an_endpoint_leads_nobody_elsewhere(protocol: str) -> None:
    async with standing_in(StandIn(even)) as other:
        path = "/chat/completions" if protocol == "chat" else "/v1/messages"
        one = StandIn(even, mood=lambda n: (307, {"Location": other.url + path}, ""))
        async with standing_in(one):
            with pytest.raises(DeadError, match="status 307"):
                await ask(endpoint(one, protocol=protocol, key=KEY))
        assert not other.heard


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_reply_with_what_is_no_block_is_none(protocol: str) -> None:
    """An evaluation that goes on reads the replies that are kept, so one that it could not read is not kept."""
    if protocol == "chat":  # whatever a message's content is, is read (test_chat)
        wrong = [json.dumps(one) for one in ({}, {"choices": []}, {"choices": [{"message": 5}]})]
    else:
        blocks: list[Any] = [{"type": "text"}, {"type": "tool_use"}, {"type": "text", "text": "So.", "citations": 5}]
        wrong = [json.dumps({"content": [one], "usage": [1]}) for one in blocks]
    one = StandIn(even, mood=lambda n: (200, {}, wrong[n - 1]) if n <= len(wrong) else None)
    async with standing_in(one):
        reply = await ask(endpoint(one, protocol=protocol))
    assert reply["content"][0]["text"] == "So." and calls_of(reply) is not None


async def test_an_answer_has_a_size_and_an_address_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.traces.ingest.endpoints._LONGEST_ANSWER", 1 << 20)
    for protocol in ("chat", "messages"):
        for status in (200, 400):
            one = StandIn(even, mood=lambda n, status=status: (status, {}, " " * (1 << 21)) if n < 3 else None)
            async with standing_in(one):
                assert (await ask(endpoint(one, protocol=protocol)))["content"] and len(one.heard) == 3
        for url in ("nowhere", "http://[::1", "http://127.0.0.1:9"):
            with pytest.raises(DeadError, match=r"t: .* cannot be reached: ."):
                await ask(Endpoint("t", url, "m", protocol=protocol))


async def test_a_named_pause_holds_for_the_whole_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def quick(seconds: float, *rest: Any) -> None:
        if seconds:
            slept.append(seconds)
        await sleep(0)

    dates = ["7", "Fri, 31 Dec 2100 23:59:59 GMT"]
    one = StandIn(even, mood=lambda n: (429, {"Retry-After": dates[n - 1]}, "") if n <= 2 else None)
    async with standing_in(one):
        made = endpoint(one)
        monkeypatch.setattr("rl.traces.ingest.endpoints.asyncio.sleep", quick)
        await ask(made)
        assert 6 < slept[0] <= 7 and 3590 < slept[1] <= 3600  # an hour at most
        await ask(made)
        assert slept[2] > 3590  # the next request waits, too


async def test_newer_models_name_the_limit_otherwise() -> None:
    refusal = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    one = StandIn(even, mood=lambda n: (400, {}, refusal) if n <= 4 else None)
    async with standing_in(one):
        asked = endpoint(one, max_tokens=77)
        await asyncio.gather(*(ask(asked) for _ in range(4)))  # all are under way before the first is refused
        assert all(said["max_completion_tokens"] == 77 and "max_tokens" not in said for said in one.heard[4:])


async def test_a_budget_waits_for_what_is_under_way() -> None:
    budget = Budget(10, 2)
    assert await budget.reserve(5)
    waiting = asyncio.create_task(budget.reserve(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    await budget.settle(5, 1)
    assert await waiting and not budget.reached and budget.spent == 3
    assert not await budget.reserve(8) and budget.reached
    assert await Budget(None, 0).reserve(1e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name=a,url=u", "model is missing"),
        ("name=a,url=u,model=m,price=3", "'price' is none of"),
        ("name=a,url=u,model=m,protocol=soap", "protocol is chat or messages"),
        ("name=a,url=u,model=m,concurrency=0", "out of range"),
        ("name=a,url=u,model=m,price_in=x,price_out=1", "is no number"),
        ("name=a,url=u,model=m,price_in=1", "give both"),
        ("name=a,url=u,model=m,key_env=NOT_SET_AT_ALL", "NOT_SET_AT_ALL"),
    ],
)
def test_a_wrong_teacher_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        teacher_of(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("claude-opus-5", "claude"), ("anthropic/claude-3-5-haiku@2024", "claude"), ("Qwen/Qwen3-Coder-30B", "qwen"),
        ("o3-mini", "gpt"), ("openai/gpt-oss-120b", "gpt"), ("Devstral-Small", "mistral"), ("zai-org/GLM-4.6", "glm"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek"), ("my-own-model", "my"), ("", ""),
    ],
)  # fmt: skip
def test_families(model: str, family: str) -> None:
    assert family_of(model) == family


def test_a_majority_is_more_than_half() -> None:
    replies: dict[str, Message] = {
        name: {"role": "assistant", "content": [block]}
        for name, block in {"a": EDIT, "b": READ, "c": {**EDIT, "id": "other"}, "d": READ}.items()
    }
    assert majority(replies) == []
    assert majority({name: replies[name] for name in "abc"}) == ["a", "c"]
    assert majority({"a": EDIT and replies["a"]}) == ["a"] and majority({}) == []
