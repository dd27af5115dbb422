"""This module tests collections without an engine: the command line, the translation to chat completions, replies read
from a stream, files from a hostile box, datasets and spans.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl.evaluate.config import compose_evaluation
from rl.evaluate.run import run
from rl.quickstart.tasks import make_tasks
from rl.run.journal import Journal
from rl.run.screen import Screen
from rl.traces.collect.command import BACKENDS, fill_slots, main
from rl.traces.collect.dataset import rows
from rl.traces.collect.outputs import Collection
from rl.traces.collect.spans import spans_of
from rollout import SIDE_MODEL
from rollout.agent import AgentRun, Status
from rollout.agent.claude_code import ClaudeCode
from rollout.agent.kept import _SCRIPT, AgentOutput, unpack
from rollout.proxy.calls import CallRecord, reply_in
from rollout.proxy.chat import chat_request, reply_of
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.messages import RequestError
from rollout.proxy.replies import Reply, reply_events, reply_start_event
from rollout.proxy.server import ProxyServer
from rollout.records import NodeRecord, Record, node_records, pack_floats, pack_ids
from rollout.trace import trace
from tests.kit import CharTokenizer, QueueEngine, char_policy, empty_record


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=3, n_train=2, n_heldout=1)
    return out / "train.parquet"


SLOTS = ["models.high=a", "models.low=b"]
DEAD = "endpoint=http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vlm"], "vlm: the first argument is a back end: vllm, anthropic, openai, expert"),
        (["vllm", DEAD, "data=x"], "models.high is not set"),
        (["vllm", DEAD, "data=x", "models.high=a"], "models.low is not set"),
        (["vllm", *SLOTS], "neither is set"),
        (["vllm", DEAD, *SLOTS], "data is not set"),
        (["vllm", DEAD, *SLOTS, "data=/no/tasks.parquet"], "data: no file /no/tasks.parquet"),
        (["expert", "data=x"], "neither is set"),
        (["expert", DEAD, "data=x"], "give policy=MODEL, and no endpoint"),
        (["anthropic", *SLOTS], "key_env names ANTHROPIC_API_KEY, which is not set"),
        (["openai", *SLOTS], "key_env names OPENAI_API_KEY, which is not set"),
        (["vllm", DEAD, *SLOTS, "epochs=0"], "epochs is 0"),
        (["vllm", DEAD, *SLOTS, "max_turns=5"], "did you mean agent.max_turns?"),
        (["vllm", DEAD, *SLOTS, "agent.hooks=/no/hooks.json"], "agent.hooks: /no/hooks.json cannot be read"),
        (["vllm", DEAD, *SLOTS, "agent.skills=[/no]"], "agent.skills: /no has no SKILL.md"),
        (["vllm", DEAD, *SLOTS, "agent.bare=true", "agent.hooks={}", "agent.skills=[x]"], "runs without agent.hooks"),
        (["vllm", DEAD, *SLOTS, "proxy.side_calls=forward"], "leave out proxy.side_calls=forward"),
    ],
)
def test_a_wrong_command_is_a_line_and_creates_nothing(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert main([*arguments, *([f"root={tmp_path}/root"] if len(arguments) > 1 else [])]) == 2
    out, err = capfd.readouterr()
    assert said in err and all(line.startswith("config: ") for line in err.splitlines()) and not out
    assert not (tmp_path / "root").exists()


def test_the_command_that_is_documented(capfd: pytest.CaptureFixture[str]) -> None:
    from rollout import collect

    assert collect.main(["--help"]) == 0 and "python -m rollout.collect vllm" in capfd.readouterr().out


def test_a_dead_endpoint_is_a_line(tasks_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for backend in ("vllm", "anthropic", "openai"):
        assert main([backend, DEAD, *SLOTS, f"data={tasks_file}", f"root={tmp_path}/root", "key_env=null"]) == 2
        err = capfd.readouterr().err
        assert "does not answer" in err and len(err.splitlines()) == 1 and not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("backend", "low", "wanted"),
    [
        ("vllm", "a", ("train", "messages", None, None)),
        ("vllm", "b", ("forward", "chat", "http://127.0.0.1:9/v1", "b")),
        ("anthropic", "b", ("forward", "messages", "http://127.0.0.1:9", "b")),
        ("openai", "b", ("forward", "chat", "http://127.0.0.1:9", "b")),
    ],
)
def test_the_low_slot_answers_side_calls(backend: str, low: str, wanted: tuple[Any, ...]) -> None:
    given = [*BACKENDS[backend], DEAD, "data=x", "models.high=a", f"models.low={low}"]
    config, _ = compose_evaluation(given, "collect")
    fill_slots(config)
    side = config.proxy.side_endpoint
    assert (config.proxy.side_calls, side.protocol, side.url, side.model) == wanted and config.model == "a"


async def test_calls_of_both_slots_are_kept_as_they_went_over_the_wire() -> None:
    """The low slot's are forwarded, streamed and whole; the high slot's are in the tree."""
    back, front = ProxyServer(), ProxyServer()
    await back.start()
    await front.start()
    small = await back.open_session("small", char_policy(QueueEngine("said\n by  small", "again")))
    side = SideEndpoint(f"http://127.0.0.1:{back.port}", "small", small.secret)
    own = replace(char_policy(QueueEngine("[[Read {}]]")), side_endpoint=side)
    session = await front.open_session("e", own)
    asked: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as http:
        for model, stream in ((SIDE_MODEL, True), (SIDE_MODEL, False), ("policy", True), ("policy", "no")):
            url, body = f"http://127.0.0.1:{front.port}/v1/messages", {**asked, "model": model, "stream": stream}
            async with http.post(url, json=body, headers={"x-api-key": session.secret}) as reply:
                assert (reply.status == 200) is (stream != "no") and await reply.read()
    talk, said = session.talk, b'{"role": "user", "content": "hi"}'
    assert talk.parts[0] == said and len(talk.parts) == 3 and not talk.lost
    first, second = talk.calls
    assert first.side and second.side
    assert first.reply["content"] == [{"type": "text", "text": "said\n by  small"}]
    assert second.reply["content"][0]["text"] == "again" and second.reply["model"] == "small"
    asked, reply = session.tree.nodes
    assert (asked.says, asked.head) == (b"[%b]" % said, b'["",[]]') and reply.reply.blocks[0]["name"] == "Read"  # type: ignore[union-attr]
    found = trace(empty_record(nodes=node_records(session.tree), parts=talk.parts, calls=talk.calls))
    assert [(point.side, point.node) for point in found.points] == [(True, -1), (True, -1), (False, 1)]
    await front.stop()
    await side.close()
    await back.stop()


def test_a_journal_that_cannot_be_written_is_no_wrong_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        journal = Journal(tmp_path / "j")
        journal._file = open("/dev/full", "wb")  # noqa: SIM115
        journal.append({"infra": None})
        return 0

    assert run(Screen(), work) == 1
    said = capfd.readouterr()
    assert said.err.startswith("stopped: ") and "No space left" in said.err and said.out.startswith("continue  ")


# --- to chat completions and back

ASKED: dict[str, Any] = {
    "model": "policy", "max_tokens": 7, "stop_sequences": ["X"], "stream": True, "thinking": {"type": "adaptive"},
    "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "tool", "name": "Read"},
    "messages": [
        {"role": "user", "content": "  go\n"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a\n\nb ", "signature": "s"}, {"type": "text", "text": " one  "},
            {"type": "text", "text": "\ttwo\n"},
            {"type": "tool_use", "id": "call_1", "name": "Read", "input": {"p": "é"}},
            {"type": "tool_use", "id": "call_2", "name": "Read", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>x</system-reminder>"},
            {"type": "tool_result", "tool_use_id": "call_1", "content": [
                {"type": "text", "text": "seen "},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
            ]},
            {"type": "tool_result", "tool_use_id": "call_2", "content": "none", "is_error": True},
        ]},
        {"role": "system", "content": "between"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
}  # fmt: skip


def test_a_request_becomes_a_chat_completion_with_all_that_was_said() -> None:
    sent = chat_request(ASKED, "large")
    assert (sent["model"], sent["max_tokens"], sent["stop"]) == ("large", 7, ["X"]) and "stream" not in sent
    assert sent["tools"] == [
        {"type": "function", "function": {"name": "Read", "description": "Reads.", "parameters": {"type": "object"}}}
    ]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "Read"}}
    system, go, said, one, two, rest, between, last = sent["messages"]
    assert (system["content"], go["content"]) == ("one\ntwo", "  go\n")
    assert (said["content"], said["reasoning_content"]) == (" one  \ttwo\n", "a\n\nb ")
    assert [(c["id"], json.loads(c["function"]["arguments"])) for c in said["tool_calls"]] == [
        ("call_1", {"p": "é"}),
        ("call_2", {}),
    ]
    assert (one["tool_call_id"], two["tool_call_id"], two["content"]) == ("call_1", "call_2", "none")
    assert one["content"] == "seen \n[image]" and rest["content"][0]["image_url"]["url"] == "data:image/png;base64,AA"
    assert rest["content"][1]["text"] == "<system-reminder>x</system-reminder>"
    assert (between["role"], between["content"], last["content"]) == ("system", "between", "a\nb")
    for wrong in ({}, {"messages": [1]}, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}):
        with pytest.raises(RequestError, match="not a request of the Messages API"):
            chat_request(wrong, "m")


def completion(**message: Any) -> bytes:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": message.pop("finish", "stop")}
    return json.dumps({"id": "1", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()


def test_a_chat_completion_becomes_a_reply() -> None:
    call = {"id": "call_1", "function": {"name": "Read", "arguments": '{"p": 1}'}}
    broken = {"id": "call_2", "function": {"name": "Read", "arguments": '{"p": '}}
    reply = reply_of(completion(content=" a\n b ", reasoning_content="t\n", tool_calls=[call, broken]))
    assert reply.blocks == (
        {"type": "thinking", "thinking": "t\n"},
        {"type": "text", "text": " a\n b "},
        {"type": "tool_use", "id": reply.blocks[2]["id"], "name": "Read", "input": {"p": 1}},
        {"type": "text", "text": 'Read({"p": )'},
    )
    assert (reply.stop_reason, reply.input_tokens, reply.output_tokens) == ("tool_use", 3, 2)
    ids = [name for one in (reply, reply_of(completion(tool_calls=[call]))) for name in (one.id, *one.tool_ids)]
    assert len(set(ids)) == 4 and "call_1" not in ids  # ours: servers use theirs again, or send none
    assert reply_of(completion(content="x", finish="length")).stop_reason == "max_tokens"
    for wrong in (b"<html>", b"{}", b'{"choices": []}', b'{"choices": [{"message": 3}]}', b"\xff"):
        with pytest.raises(RequestError, match="not a chat completion"):
            reply_of(wrong)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
blocks = st.lists(
    st.one_of(
        st.builds(lambda t: {"type": "text", "text": t}, texts),
        st.builds(lambda t: {"type": "tool_use", "id": "c", "name": "T", "input": {"a": t}}, texts),
    ),
    max_size=4,
)


@given(blocks, texts)
def test_a_streamed_reply_is_read_as_it_was_sent(said: list[dict[str, Any]], thought: str) -> None:
    content = [{"type": "thinking", "thinking": thought}, *said]
    reply = Reply("msg_1", tuple(content), "tool_use", 5, 6)
    heard = reply_start_event("msg_1", "m", 5) + b'event: ping\ndata: {"type": "ping"}\n\n' + reply_events(reply)
    found = reply_in(heard)
    assert found is not None and (found["id"], found["stop_reason"]) == ("msg_1", "tool_use")
    assert [{k: v for k, v in block.items() if k != "signature"} for block in found["content"]] == content
    assert found["usage"] == {"input_tokens": 5, "output_tokens": 6}
    assert reply_in(heard[: heard.rindex(b"event: message_stop")]) is None


@given(st.binary(max_size=200), st.integers(0, 400))
def test_whatever_an_endpoint_sends_is_a_reply_or_none(data: bytes, cut: int) -> None:
    reply = Reply("m", ({"type": "text", "text": "x"},), "end_turn", 1, 1)
    heard = reply_start_event("m", "m", 1) + reply_events(reply)
    deep = b"data: " + b"[" * 9999
    for wrong in (data, heard[:cut] + data + heard[cut:], b'{"id": "x", "content": [3]}', b"data: [1]\n", deep):
        found = reply_in(wrong)
        assert found is None or all(isinstance(block["type"], str) for block in found["content"])


# --- files of a hostile box


def test_the_script_in_the_box_gives_files_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "s" / "sub").mkdir(parents=True)
    (tmp_path / "s" / "a b.jsonl").write_bytes(b"1\0 2\n")
    (tmp_path / "s" / "sub" / "empty").touch()
    (tmp_path / "s" / "large").write_bytes(b"x" * 200)
    (tmp_path / "s" / "link").symlink_to("/etc/passwd")
    (tmp_path / "one").write_bytes(b"\xff")
    command = ["sh", "-c", _SCRIPT, "sh", "100", "s", "one", "none"]
    done = subprocess.run(command, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert unpack(done.stdout) == ({"s/a b.jsonl": b"1\0 2\n", "s/sub/empty": b"", "one": b"\xff"}, True)


BEGINNINGS = [b"", b"a\x003\0abc", b"../x\x001\0a", b"/x\x001\0a", b"a\x0099999999999\0", "a\0²\0".encode()]


@given(st.binary(max_size=300), st.sampled_from(BEGINNINGS))
def test_no_output_of_a_box_leaves_its_directory(data: bytes, begin: bytes) -> None:
    files, _ = unpack(begin + data)
    assert all(not name.startswith("/") and ".." not in name.split("/") for name in files)
    assert sum(map(len, files.values())) <= len(begin + data)


def frame(name: bytes) -> bytes:
    return name + b"\x001\0x"


@pytest.mark.parametrize(
    ("names", "whole", "lost"),
    [
        ([b".claude/projects/p/" + b"\xff" * 100], False, 0),  # 300 bytes once it is text
        ([b".claude/hooks.jsonl", b".claude/projects/hooks.jsonl/s.jsonl"], True, 1),
        ([b".claude/projects/a", b".claude/projects/a/b"], True, 1),
        ([b".claude/projects/a/b", b".claude/projects/a"], True, 1),
        ([b"."], False, 0),
    ],
)
def test_no_name_of_a_file_ends_a_collection(names: list[bytes], whole: bool, lost: int, tmp_path: Path) -> None:
    files, all_of_them = unpack(b"".join(map(frame, names)))
    assert all_of_them == whole
    told = {"cooldown_s": 0, "grade": False, "protocol": "tokens", "key_env": None}
    collection, record = Collection(OmegaConf.create(told)), a_record()
    agent = AgentRun(Status.FINISHED, 1, "", [], None, AgentOutput(b"", b"", files))
    episode: Any = SimpleNamespace(agent=agent, patch=b"", verdict=SimpleNamespace(detail="", log_tail=""))
    collection._write(tmp_path / "t" / "epoch_0", episode, trace(record), [])
    assert len(record.missing) == lost and (tmp_path / "t" / "epoch_0" / "episode.json").exists()


def test_files_of_an_agent_are_read_when_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"env": {"A": "${A}"}, "hooks": {"Stop": []}}')
    (tmp_path / "h.json").write_text('{"hooks": {"PreCompact": []}}')
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "k" / "x").mkdir(parents=True)
    (tmp_path / "k" / "SKILL.md").write_text("skill")
    (tmp_path / "k" / "x" / "run.sh").write_text("echo")
    binary = tmp_path / "claude"
    binary.touch(mode=0o755)
    common: dict[str, Any] = {"binary": str(binary), "tools": None, "extra_args": []}
    common |= {"max_turns": 1, "timeout_s": 1, "max_tokens": 1}
    made = ClaudeCode.of(
        **common, settings=str(tmp_path / "s.json"), hooks=str(tmp_path / "h.json"), skills=[str(tmp_path / "k")],
        mcp_servers={"a": {"command": "b"}}, output_style="Learning",
    )  # fmt: skip
    argv = made.argv("/home/agent")
    assert json.loads(argv[argv.index("--settings") + 1]) == {
        "env": {"A": "${A}"}, "hooks": {"Stop": [], "PreCompact": []}, "outputStyle": "Learning",
    }  # fmt: skip
    assert json.loads(argv[argv.index("--mcp-config") + 1]) == {"mcpServers": {"a": {"command": "b"}}}
    assert argv[argv.index("--plugin-dir") + 1] == "/home/agent/.own"
    manifest = made.files()[".own/.claude-plugin/plugin.json"]
    skill = {".own/skills/k/SKILL.md": b"skill", ".own/skills/k/x/run.sh": b"echo"}
    assert json.loads(manifest) == {"name": "own"}
    assert made.files() == {**skill, ".own/.claude-plugin/plugin.json": manifest}
    bad = str(tmp_path / "bad.json")
    for wrong, said in ((bad, "is no JSON"), ("[1]", "cannot be read"), ({"a": "x" * 10**6}, "larger than")):
        with pytest.raises(ValueError, match=said):
            ClaudeCode.of(**common, settings=wrong)


# --- rows and spans


def a_record() -> Record:
    """Two calls of one thread: 'ab' -> 'cd', then 'e' -> 'f'."""
    asked = [{"role": "user", "content": "ab"}]
    more = [{"role": "user", "content": [{"type": "text", "text": "e"}, {"type": "image", "source": {}}]}]
    ids = [pack_ids([ord(c) for c in text]) for text in ("ab", "cd", "e", "f")]
    nodes = [NodeRecord(parent=n - 1, ids=one) for n, one in enumerate(ids)]
    nodes[0].says, nodes[0].head, nodes[2].says = json.dumps(asked).encode(), b'["S",[]]', json.dumps(more).encode()
    for number, text in ((1, "cd"), (3, "f")):
        nodes[number].logprobs, nodes[number].started = pack_floats([-0.5] * len(text)), float(number)
        nodes[number].blocks, nodes[number].message_id = [{"type": "text", "text": text}], f"msg_{number}"
        nodes[number].stop_reason, nodes[number].delivered = "end_turn", True
    verdict = {"outcome": "resolved", "reason": None, "reward": 1.0, "detail": "", "flags": []}
    return empty_record(version=4, nodes=nodes, verdict=verdict, timing={"total": 9.0})


def test_rows_repeat_what_each_reply_answers() -> None:
    first, second = rows(trace(a_record()), 0, CharTokenizer())
    assert (first["prompt"], second["prompt"], second["reward"]) == ("ab", "abcde", 1.0)
    assert (second["response_ids"], second["gold_completion_ids"], second["logprobs"]) == ([102], [102], [-0.5])
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert json.loads(second["messages"][3]["content"])[1]["type"] == "image"
    assert second["messages"][4]["content"] == "f"


@pytest.mark.timeout(300)
def test_agentlightnings_adapters_read_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
    from agentlightning.types import Span

    spans = [Span.model_validate(json.loads(json.dumps(span))) for span in spans_of(trace(a_record()))]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        found = adapter.adapt(spans)
        assert [(one.prompt["token_ids"], one.response["token_ids"]) for one in found] == [
            ([97, 98], [99, 100]),
            ([97, 98, 99, 100, 101], [102]),
        ]
        assert [one.reward for one in found] == [None, 1.0]
    logprobs = [one.response["logprobs"] for one in TracerTraceToTriplet().adapt(spans)]
    assert logprobs == [[{"logprob": -0.5}] * 2, [{"logprob": -0.5}]]


def test_forwarded_calls_with_the_same_beginning_are_one_thread() -> None:
    said = [{"type": "text", "text": "cd"}]
    sent = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": said}, {"role": "user", "content": "e"}]
    parts = [b'"S"', b"[]", *(json.dumps(message).encode() for message in sent)]
    calls = [
        CallRecord(messages, system=0, tools=1, reply={"id": "msg", "content": said}, started=float(number))
        for number, messages in enumerate(([2], [2, 3, 4], [4]))
    ]
    spans = spans_of(trace(empty_record(parts=parts, calls=calls)))
    found = [one["attributes"] for one in spans if one["name"] == "raw_gen_ai_request"]
    assert [one["claude_code_rl.thread"] for one in found] == [0, 0, 1]
