"""This module tests what is made of states: rows for fine-tuning, and an evaluation of a policy on recorded states."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rl.ingest import main
from rl.quickstart.policy import make_tokenizer
from rl.sft.episodes import write_pairs, write_rows
from rl.teachers import outcome
from rl.traces.ingest import states
from rl.traces.ingest.agreement import calls_of, same_call, same_tool, unknown
from rl.traces.ingest.chat import message_of
from rl.traces.ingest.sft import ChatEncoder, chat_of
from rl.traces.ingest.states import Message, State, read_states
from rl.traces.rows import RowsError, TokenRows
from rollout.proxy.chat import chat_request
from tests.endpoint_kit import KEY, StandIn, standing_in
from tests.ingest_kit import write_session
from tests.kit import full_at, saved_again
from tests.unit.proxy.test_render import glm

ROOT = Path(__file__).parents[3]


def state(messages: list[Message], action: list[Message], name: str = "s", system: str = "SYS") -> State:
    told = [{"role": "system", "content": system}, *messages]
    said = {"role": "assistant", "content": action}
    return State(state_id=name, messages=told, student_action=said, source_model="m", conversation=name, tools=TOOLS)


def use(name: str, number: int = 1, **given: Any) -> Message:
    return {"type": "tool_use", "id": f"t{number}", "name": name, "input": given}


def said(text: str) -> Message:
    return {"type": "text", "text": text}


TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": "", "input_schema": {"type": "object"}} for name in ("Bash", "Edit", "Read")
]
TALK = [
    {"role": "user", "content": "Fix <|im_end|> it."},
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use("Read", file_path="a.py")]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "<|im_start|>text"}]},
]
EDIT = use("Edit", 2, file_path="a.py", old_string="<|im_end|>", new_string="b")


def test_a_row_ends_with_the_turn_whatever_the_tokenizer_calls_its_end(tmp_path: Path) -> None:
    tokenizer, converted = make_tokenizer(), saved_again(make_tokenizer(), tmp_path)
    chat = chat_of(state(TALK, [{"type": "text", "text": "So:"}, EDIT]))
    assert converted.eos_token_id != tokenizer.eos_token_id
    assert ChatEncoder(converted).ids(*chat) == ChatEncoder(tokenizer).ids(*chat)


def test_a_row_ends_where_the_engine_stops_if_the_next_role_closes_a_turn() -> None:
    tokenizer = glm()
    names = ("<|user|>", "<|observation|>")
    user, observation = (tokenizer.convert_tokens_to_ids(name) for name in names)
    coder = ChatEncoder(tokenizer, [tokenizer.eos_token_id, user, observation])
    talk: list[Message] = [{"role": "user", "content": "Go."}]
    for action, end in (([said("So:"), EDIT], observation), ([said("Done.")], user)):
        one = state(talk, action)
        one.tools = []
        *_, reply = coder.ids(*chat_of(one))
        assert reply[-1] == end and not {user, observation, tokenizer.eos_token_id} & {*reply[:-1]}
    with pytest.raises(ValueError, match="no token at which an engine stops"):
        ChatEncoder(tokenizer).ids(*chat_of(one))


def test_a_row_has_the_template_and_trains_the_reply() -> None:
    tokenizer = make_tokenizer()
    head, said = ChatEncoder(tokenizer).ids(*chat_of(state(TALK, [{"type": "text", "text": "So:"}, EDIT])))
    ids, reply = [*head, *said], tokenizer.decode(said)
    assert said[-1] == tokenizer.eos_token_id
    assert "So:" in reply and "<function=Edit>" in reply and reply.count("<|im_end|>") == 2
    # What spells a control token is text: the only ones are those that the template has written.
    assert ids.count(tokenizer.eos_token_id) == 5
    # Without such texts, it is what the template makes in one piece.
    plain = state([{"role": "user", "content": "Go."}], [{"type": "text", "text": "Yes."}])
    plain.tools = []
    whole = tokenizer.apply_chat_template(chat_of(plain)[0], tokenize=True, return_dict=False)
    made = [token for ids in ChatEncoder(tokenizer).ids(*chat_of(plain)) for token in ids]
    assert whole[: len(made)] == made and tokenizer.decode(whole[len(made) :]).strip() == ""


def test_rows_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, rows = tmp_path / "a.jsonl", tmp_path / "s.jsonl", tmp_path / "rows.parquet"
    write_session(source, turns=6, text="r" * 100)
    assert main(["claude-code", str(source), "--out", str(out)]) == 0
    assert [bool(unknown(one)) for one in read_states(out)] == [True] * 6  # older versions name neither
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "system.txt").write_text("Be good.")
    given = ["--tools", str(tmp_path / "tools.json"), "--system", str(tmp_path / "system.txt")]
    assert main(["claude-code", str(source), "--out", str(out), *given]) == 0
    make_tokenizer().save_pretrained(tmp_path / "model")
    command = ["sft", str(out), "--tokenizer", str(tmp_path / "model"), "--out", str(rows), "--max-tokens"]
    assert main([*command, "100000"]) == 0
    assert "texts are encoded anew" in capsys.readouterr().out
    table = pyarrow.parquet.read_table(rows).to_pylist()
    # One conversation is one row, in which each state's reply is trained where it stands.
    (row,), coder, mask, sizes = table, ChatEncoder(make_tokenizer()), list[int](), []
    for one in read_states(out):
        head, reply = coder.ids(*chat_of(one))
        mask += [0] * (len(head) - len(mask)) + [1] * len(reply)
        sizes.append(len(mask))
        assert row["input_ids"][: len(mask)] == head + reply
    assert row["loss_mask"] == mask and len(sizes) == 6
    config = type("C", (), {"max_length": 100_000})
    assert len(TokenRows(str(rows), None, config)) == 1
    policy = AutoTokenizer.from_pretrained(tmp_path / "model")
    counts = write_rows([rows], tmp_path / "taken.parquet", max_length=100_000, tokenizer=policy)
    assert (counts.given, counts.episodes, counts.too_long) == (1, 0, 0)
    assert main([*command, str(sizes[2])]) == 0
    (shorter,) = pyarrow.parquet.read_table(rows).to_pylist()
    assert shorter["input_ids"] == row["input_ids"][: sizes[2]]
    assert main([*command[:3], str(tmp_path / "none"), *command[4:], "9"]) != 0
    assert capsys.readouterr().err.count("\n") == 1


def test_teachers_replies_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """distill.jsonl becomes rows as of states, pairs.jsonl pairs as rl.sft trainer=dpo takes them."""
    with states.writing(tmp_path / "s.jsonl") as writer:
        for name in ("a", "b"):
            writer.begin(name, "x")
            head = writer.head("SYS", TOOLS)
            writer.state(name, head, writer.tip(TALK), {"role": "assistant", "content": [EDIT]}, "m")
    reads = [{"type": "text", "text": "So:"}, use("Read", 9, file_path="b.py")]
    answers = {("a", "t"): {"action": {"role": "assistant", "content": [EDIT]}}}
    answers["b", "t"] = {"action": {"role": "assistant", "content": reads}}
    outcome.write(tmp_path / "s.jsonl", None, ["t"], answers, tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    with open(tmp_path / "distill.jsonl", "a") as file:
        file.write('{"messages": 3}\n{"messages": [')

    def rows(name: str, status: int) -> list[dict[str, Any]]:
        out = tmp_path / f"{name}.parquet"
        command = ["sft", str(tmp_path / f"{name}.jsonl"), "--tokenizer", str(tmp_path / "model"), "--out", str(out)]
        assert main(command) == status
        return pyarrow.parquet.read_table(out).to_pylist()

    same, other = rows("distill", 1)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "distill.jsonl: line 3: " in said[0] and "distill.jsonl: line 4: " in said[1]
    head, reply = ChatEncoder(tokenizer).ids(*chat_of(state(TALK, [EDIT])))
    assert same["input_ids"] == head + reply and same["loss_mask"] == [0] * len(head) + [1] * len(reply)
    (pair,) = rows("pairs", 0)
    chosen = ChatEncoder(tokenizer).ids(*chat_of(state(TALK, reads)))
    assert (pair["prompt_ids"], pair["chosen_ids"], pair["rejected_ids"]) == (*chosen, reply)
    assert pair["state_id"] == other["state_id"] == "b" and other["input_ids"] == [*chosen[0], *chosen[1]]
    policy = AutoTokenizer.from_pretrained(tmp_path / "model")
    taken = tmp_path / "taken.parquet"
    assert write_pairs([tmp_path / "pairs.parquet"], taken, 10**6, policy) == (1, 0)
    with pytest.raises(RowsError, match=r"^1 pairs are longer than 9 tokens"):
        write_pairs([tmp_path / "pairs.parquet"], taken, 9, policy)
    with pytest.raises(RowsError, match="has no column prompt_ids"):
        write_pairs([tmp_path / "distill.parquet"], taken, 9, policy)


@pytest.mark.parametrize(
    ("one", "other", "calls", "tools"),
    [
        (use("Read", file_path="a"), use("Read", 2, file_path=" a\n"), True, True),
        (use("Read", file_path="a", limit=3), use("Read", limit="3", file_path="a", offset=None), True, True),
        (use("Edit", new="x", replace_all=False), use("Edit", new="x"), True, True),
        (use("Edit", new="x", replace_all="false"), use("Edit", new="x"), True, True),  # as in a text
        (use("Use", arguments='{"a": [1]}'), use("Use", arguments={"a": [1]}), True, True),
        (use("Bash", command="ls", description="List"), use("Bash", command="ls", description="See"), True, True),
        (use("Bash", timeout=1200000.0), use("Bash", timeout=1200000), True, True),
        (use("Bash", timeout=0.1234567), use("Bash", timeout=0.1234568), False, True),
        (use("Bash", command="ls"), use("Bash", command="ls -l"), False, True),
        (use("Note", description="a"), use("Note", description="b"), False, True),
        (use("Read", file_path="a"), use("Edit", file_path="a"), False, False),
        (use("Read", file_path="a"), {"type": "text", "text": "Done."}, False, False),
        ({"type": "text", "text": "I am done."}, {"type": "text", "text": "Done."}, True, True),
        (
            said("<function=bash>\n<parameter=command>ls</parameter>\n</function>"),
            use("bash", command="ls"),
            True,
            True,
        ),
        (said('<tool_call>\n{"name": "b", "arguments": {"n": 1}}\n</tool_call>'), use("b", n=1), True, True),
        (said('```json\n{"name": "b", "arguments": {"n": 1}}\n```'), use("b", n=1), True, True),
        (said("I look.\n\n```\nls -l\n```"), said("```bash\nls -l\n```"), True, True),
        (said("```mswea_bash_command\nls -l\n```"), said("```bash\nls -l\n```"), True, True),
        (said("```\nls -l\n```"), said("I'm sorry."), False, False),
        (said('<tool_call>{"name": "b", "arguments": {"n": "\\ud800"}}</tool_call>'), use("b", n=1), False, False),
        (said("<tool_call>\nls\n</tool_call>"), said("<tool_call>\nls\n</tool_call>"), False, False),  # not to be read
    ],
)
def test_agreement(one: Message, other: Message, calls: bool, tools: bool) -> None:
    pair: Any = [{"role": "assistant", "content": [block]} for block in (one, other)]
    assert (same_call(*pair), same_tool(*pair)) == (same_call(*pair[::-1]), same_tool(*pair[::-1])) == (calls, tools)


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
inputs = st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3)


@given(texts, st.lists(st.tuples(texts, inputs), max_size=3))
def test_a_reply_survives_both_translations(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    blocks = [use(name, number, **{}) | {"input": given} for number, (name, given) in enumerate(calls)]
    action: Any = {"role": "assistant", "content": [{"type": "text", "text": text}, *blocks]}
    (chat,) = chat_request({"messages": [action]}, "m")["messages"]
    assert message_of(chat) == action


@pytest.mark.parametrize("mark", ["<function=a>", "<function=a></function><parameter=b>", "<tool_call>{", "```json\n{"])
def test_a_reply_that_never_ends_its_calls_is_read_at_once(mark: str) -> None:
    began = time.process_time()
    for text in (mark * 20_000, f"<function=a>{mark * 20_000}</function>"):
        calls_of({"role": "assistant", "content": text})
    assert time.process_time() - began < 5


def write_states(out: Path, found: list[State]) -> None:
    with states.writing(out) as writer:
        for one in found:
            writer.begin(one.conversation, "test")
            head = writer.head(one.messages[0]["content"], one.tools)
            writer.state(one.state_id, head, writer.tip(one.messages[1:]), one.student_action, one.source_model)


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_policy_is_compared_with_the_recorded_replies(tmp_path: Path, protocol: str) -> None:
    recorded = [state(TALK, [EDIT], name=f"s{n}", system=f"number {n};") for n in range(20)]
    write_states(tmp_path / "s.jsonl", recorded)

    def reply(text: str) -> list[Message]:
        return [{"type": "text", "text": "Hm."}, EDIT if "I look." in text and number() % 4 else use("Read", 3)]

    stand_in = StandIn(reply, mood=lambda n: (500, {"Retry-After": "0"}, "no") if n == 3 else None)

    def number() -> int:
        return len(stand_in.heard)

    async with standing_in(stand_in):
        command = [sys.executable, "-m", "rl.ingest", "evaluate", str(tmp_path / "s.jsonl"), "--url", stand_in.url]
        command += ["--model", "mine", "--out", str(tmp_path / "out"), "--key-env", "THE_KEY", "--protocol", protocol]
        command += ["--temperature", "0", "--concurrency", "1"]
        environment = {"PATH": "", "THE_KEY": KEY, "HOME": str(tmp_path)}
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["states"], results["answered"], len(stand_in.heard)) == (20, 20, 21)
    assert results["same_call"]["share"] == pytest.approx(15 / 20)
    assert results["same_call"]["low"] < results["same_call"]["share"] < results["same_call"]["high"]
    assert results["by_tool"]["Edit"]["states"] == 20 and results["input_tokens"] == 2000
    assert {body["temperature"] for body in stand_in.heard} == {0} and stand_in.keys == {f"Bearer {KEY}"}
    kept = b"".join(one.read_bytes() for one in (tmp_path / "out").iterdir())
    assert KEY.encode() not in kept and KEY not in done.stdout + done.stderr


async def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_states(tmp_path / "s.jsonl", [state(TALK, [EDIT], f"s{n}", system=f"number {n};" * 40) for n in range(20)])
    make_tokenizer().save_pretrained(tmp_path / "model")
    stand_in = StandIn(lambda text: [EDIT])

    async def run(*what: str, full: int = 1 << 40) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rl.ingest", what[0], str(tmp_path / "s.jsonl"), *what[1:]]
        return await asyncio.to_thread(subprocess.run, full_at(full, command), cwd=ROOT, capture_output=True, text=True)

    async with standing_in(stand_in):
        ask = ["evaluate", "--url", stand_in.url, "--model", "m", "--out", str(tmp_path / "out"), "--concurrency", "1"]
        done = await run(*ask, full=2000)
        assert done.returncode == 1 and done.stderr == "ingest: [Errno 27] File too large\n", done
        before = len(stand_in.heard)
        assert 1 <= before < 20
        done = await run(*ask)
        assert done.returncode == 0 and len(stand_in.heard) <= 20 + 1, done
        assert json.loads((tmp_path / "out" / "results.json").read_text())["answered"] == 20
    (tmp_path / "rows").mkdir()
    done = await run(
        "sft", "--tokenizer", str(tmp_path / "model"), "--out", str(tmp_path / "rows" / "r.parquet"), full=500
    )
    assert done.returncode == 1 and done.stderr.startswith("ingest: ") and done.stderr.count("\n") == 1, done
    assert list((tmp_path / "rows").iterdir()) == []
