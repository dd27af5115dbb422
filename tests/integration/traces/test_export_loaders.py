"""Exports, read by the loaders of the programs that they are for: LLaMA-Factory's own, which drops bad rows and loses
texts with a warning only, TRL's, and Inspect's. They are in .trainers (scripts/trainers.sh), without what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl.export import main
from rl.teachers import outcome
from tests.export_kit import SYSTEM, Play, calls_of, crowd, lines, repair, write
from tests.lacks import LACKS
from tests.unit.traces.test_ingest_uses import EDIT, TALK, state, use, write_states

ROOT = Path(__file__).parents[3]
TRAINERS = ROOT / ".trainers"
pytestmark = pytest.mark.skipif(not TRAINERS.exists(), reason=f"{LACKS}scripts/trainers.sh has not been run")

LLAMAFACTORY = """
import json, sys, yaml
from transformers import PreTrainedTokenizerFast
from llamafactory.data import get_template_and_fix_tokenizer, loader
from llamafactory.hparams import get_train_args

*outs, dump = sys.argv[1:]
found = []
for out in outs:
    model, data, training, finetuning, _ = get_train_args(yaml.safe_load(open(f"{out}/train.yaml")))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.model_name_or_path)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    stage = {"dpo": "rm"}.get(finetuning.stage, finetuning.stage)
    aligned = loader._get_merged_dataset(data.dataset, model, data, training, stage)
    made = loader.get_dataset(template, model, data, training, stage, tokenizer)["train_dataset"]

    def trained(row, ids, labels):
        return tokenizer.decode(row[ids]), tokenizer.decode([i for i in row[labels] if i >= 0])

    names = {"sft": [("input_ids", "labels")],
             "rm": [("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels")]}[stage]
    rows = [[trained(row, *pair) for pair in names] for row in made]
    found.append({"aligned": list(aligned), "rows": rows})
json.dump(found, open(dump, "w"))
"""

TRL = """
import json, sys
from datasets import load_dataset
from transformers import PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template, is_conversational

*outs, tokenizer, dump = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
found = []
for out in outs:
    rows = load_dataset("parquet", data_files=f"{out}/train.parquet", cache_dir=f"{out}/hf")["train"]
    assert all(is_conversational(row) for row in rows)
    tools = [json.loads(row["tools"]) for row in rows]
    told = [{name: value for name, value in row.items() if name != "tools"} for row in rows]
    found.append([apply_chat_template(row, tokenizer, tools=one) for row, one in zip(told, tools)])
json.dump(found, open(dump, "w"))
"""

TAUGHT = """
import json, sys
from datasets import load_dataset
from transformers import PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template, is_conversational

*files, tokenizer, dump = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
found = []
for file in files:
    rows = list(load_dataset("json", data_files=file, cache_dir=f"{file}.hf")["train"])
    assert all(is_conversational(row) for row in rows)
    told = [{n: row[n] for n in ("messages", "prompt", "chosen", "rejected") if n in row} for row in rows]
    found.append([apply_chat_template(one, tokenizer, tools=row["tools"]) for one, row in zip(told, rows)])
json.dump(found, open(dump, "w"))
"""

INSPECT = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

out, dump = sys.argv[1:]
found = []
for place in list_eval_logs(out):
    log = read_eval_log(place.name, resolve_attachments=True)
    alone = [read_eval_log_sample(place.name, one.id, one.epoch) for one in log.samples]
    assert [one.id for one in alone] == [one.id for one in log.samples]
    listed = read_eval_log_sample_summaries(place.name)
    found.append({"task": place.task, "log": log.model_dump(), "listed": [one.model_dump() for one in listed]})
json.dump(found, open(dump, "w"), default=str)
"""

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has a token for each byte, and ChatML's control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    place = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    ).save_pretrained(place)
    return place


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    records = [
        msgspec.structs.replace(await repair("a"), task="t1"),
        msgspec.structs.replace(await repair("b", "Gave \u4f60 up.\n\n  - twice ", 0.0), task="t1"),
        msgspec.structs.replace(await crowd("c"), task="t2"),
    ]
    return write(tmp_path / "run", *records)


def loaded(code: str, *arguments: object, dump: Path, place: Path = TRAINERS) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(place), "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments), str(dump)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=dump.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "abnormal" not in done.stderr and "Invalid" not in done.stderr
    return json.loads(dump.read_text())


def exported(run: Path, kinds: Sequence[str], *more: str) -> list[Path]:
    outs = [run.parent / kind for kind in kinds]
    for kind, out in zip(kinds, outs, strict=True):
        assert main([kind, str(run), "--out", str(out), *more]) == 0
    return outs


def test_llamafactory_reads_every_row_and_every_text(run: Path, tokenizer: Path) -> None:
    """Its own parser takes train.yaml, the user's values in it; its loader and its template keep all rows and texts."""
    kinds = ["llamafactory", "llamafactory-dpo"]
    ours = [f"model_name_or_path={tokenizer}", "bf16=false", "val_size=0.0", "eval_strategy='no'", "cutoff_len=100000"]
    outs = exported(run, kinds, *ours, "preprocessing_num_workers=1")
    sft, dpo = loaded(LLAMAFACTORY, *outs, dump=run.parent / "loaded.json")
    written = [lines(out / "episodes.jsonl") for out in outs]
    counts = [[len(found["aligned"]), len(found["rows"])] for found in (sft, dpo)]
    assert counts == [[len(rows)] * 2 for rows in written] == [[5, 5], [1, 1]]

    def compare(found: Any, rows: list[dict[str, Any]], said: Callable[[dict[str, Any]], list[str]]) -> None:
        """All turns are there, in their order, and what is trained on is what the format is for."""
        for row, aligned, texts in zip(rows, found["aligned"], found["rows"], strict=True):
            assert aligned["_system"] == row["system"] == SYSTEM and aligned["_tools"] == row["tools"]
            turns = [one["content"] for one in (*aligned["_prompt"], *aligned["_response"]) if one["content"]]
            assert turns == said(row)
            for whole, trained in texts:
                assert SYSTEM in whole and all(turn in whole for turn in turns[:-2])
                assert trained.startswith("".join(trained_on(found, row, turns, trained)))

    def trained_on(found: Any, row: dict[str, Any], turns: list[str], trained: str) -> list[str]:
        if found is dpo:
            return [row["rejected" if trained.startswith("Gave") else "chosen"]["value"], "<|im_end|>"]
        return [f"{one}<|im_end|>\n" for one in turns[1::2]]

    def told(row: dict[str, Any]) -> list[str]:
        return [turn["value"] for turn in row["conversations"]]

    compare(sft, written[0], told)
    compare(dpo, written[1], lambda row: [*told(row), row["chosen"]["value"], row["rejected"]["value"]])
    # What is learned has the calls in it, not only the last words.
    assert all("ls -l" in trained for (_, trained), *_ in sft["rows"][:2])


def test_trl_reads_every_row_and_every_text(run: Path, tokenizer: Path) -> None:
    outs = exported(run, ["trl", "trl-prompt-completion", "trl-preference"])
    (plain,) = exported(run, ["messages"])
    talks, replies, pairs = loaded(TRL, *outs, tokenizer, dump=run.parent / "loaded.json")
    renderer = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def whole(row: dict[str, Any], end: int | None = None) -> str:
        return renderer.apply_chat_template(row["messages"][:end], tools=row["tools"], tokenize=False)

    rows = lines(plain / "messages.jsonl")
    assert [text["text"] for text in talks] == [whole(row) for row in rows] and len(rows) == 5
    wanted = [whole(row, place + 1) for row in rows for place in row["sampled"]]
    assert [text["prompt"] + text["completion"] for text in replies] == wanted and len(wanted) == 10
    assert any("ls -l" in text["completion"] for text in replies) and "ls -l" in talks[0]["text"]
    (pair,) = pairs
    other = rows[1] | {"messages": rows[0]["messages"][:6] + rows[1]["messages"][6:]}  # the ids of calls are others
    assert [pair["prompt"] + pair[name] for name in ("chosen", "rejected")] == [whole(rows[0]), whole(other)]


def test_trl_reads_what_teachers_said(tokenizer: Path, tmp_path: Path) -> None:
    """Arguments and tools differ from row to row; none of their keys appears in another row."""
    found = [state(TALK, [EDIT], name, system=name) for name in ("a", "b")]
    for one, key in zip(found, ("path", "command"), strict=True):
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        one.tools = [{"name": f"T{key}", "description": "", "input_schema": schema}]
    write_states(tmp_path / "s.jsonl", found)
    replies = [use("Read", 9, path="a"), use("Bash", 9, command="ls")]
    answers = {
        (one.state_id, "t"): {"action": {"role": "assistant", "content": [{"type": "text", "text": "So:"}, reply]}}
        for one, reply in zip(found, replies, strict=True)
    }
    outcome.write(tmp_path / "s.jsonl", None, ["t"], answers, tmp_path)
    files = [tmp_path / "distill.jsonl", tmp_path / "pairs.jsonl"]
    taught, pairs = loaded(TAUGHT, *files, tokenizer, dump=tmp_path / "loaded.json")
    renderer = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def whole(row: dict[str, Any], *messages: dict[str, Any]) -> str:
        return renderer.apply_chat_template(messages, tools=row["tools"], tokenize=False)

    assert [one["text"] for one in taught] == [whole(row, *row["messages"]) for row in lines(files[0])]
    assert len(pairs) == 2
    for one, row in zip(pairs, lines(files[1]), strict=True):
        for name in ("chosen", "rejected"):
            assert one["prompt"] + one[name] == whole(row, *row["prompt"], *row[name])


async def test_inspect_reads_every_episode_and_every_text(run: Path) -> None:
    """What its functions read: scores, errors that are no scores, all messages, and what each reply had before it."""
    lost = {
        "outcome": "infra_failure",
        "reason": "engine_failed",
        "reward": None,
        "detail": "gone \x1b[31m",
        "flags": [],
    }
    hostile = "a/../\x1b]0;x\x07\x00"
    schema = {"type": ["object"], "properties": {"x": {"enum": 1}}, "additionalProperties": "no"}
    play = Play('[[Any {"a": {"b": [1, null]}}]]', "\x1b[2Jattachment://x \ud7ff\x00", hosted=True)
    talk: list[Any] = [{"role": "user", "content": "fix it"}]
    (call,) = calls_of(await play.ask(talk, tools=[{"name": "Any", "description": "", "input_schema": schema}]))
    play.answer(talk, (call, "\x1b]0;title\x07"))
    await play.ask(talk)
    more = [
        msgspec.structs.replace(await crowd("d"), task="t2", rows=[], verdict=lost),
        msgspec.structs.replace(play.record("h"), task=hostile, agent={"status": "max_turns", "turns": 9}),
    ]
    write(run, *more, name="x")
    (out,) = exported(run, ["inspect"])
    (plain,) = exported(run, ["messages"])
    (found,) = loaded(INSPECT, out, dump=run.parent / "loaded.json", place=TRAINERS / "inspect")
    log, listed = found["log"], found["listed"]
    assert (log["status"], log["eval"]["model"]) == ("success", "policy") and found["task"].endswith("-run-train")
    samples = {one["metadata"]["episode"]: one for one in log["samples"]}
    assert sorted(samples) == ["a", "b", "c", "d", "h"] == sorted(one["metadata"]["episode"] for one in listed)
    scores = {name: one["scores"] and one["scores"]["resolved"]["value"] for name, one in samples.items()}
    assert scores == {"a": "C", "b": "I", "c": "C", "d": None, "h": "C"}
    assert samples["d"]["error"]["message"] == "engine_failed: gone \\x1b[31m" and samples["h"]["limit"]["limit"] == 9
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.75
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (5, 4)
    for row in lines(plain / "messages.jsonl"):
        calls = [one for one in samples[row["episode"]]["events"] if one["event"] == "model"]
        for place in row["sampled"]:
            said = texts(row["messages"][: place + 1])
            assert any(texts([*one["input"], one["output"]["choices"][0]["message"]]) == said for one in calls)
    spans = [one for one in samples["d"]["events"] if one["event"] == "span_begin"]
    assert [one["type"] for one in spans] == ["agent"], "a failed episode is shown as far as it came"


def texts(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """What messages say, in OpenAI's form or in Inspect's."""
    told = []
    for one in messages:
        parts = one["content"] if isinstance(one["content"], list) else [{"text": one["content"]}]
        calls = [call.get("function") for call in one.get("tool_calls") or ()]
        if calls and isinstance(calls[0], str):
            calls = [{"name": call["function"], "arguments": call["arguments"]} for call in one["tool_calls"]]
        thought = one.get("reasoning_content") or "".join(part.get("reasoning", "") for part in parts)
        told.append((one["role"], "".join(part.get("text", "") for part in parts), thought, calls))
    return told
