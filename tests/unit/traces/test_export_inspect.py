"""This module tests the logs for Inspect: samples, scores, errors, spans. Inspect itself reads them in
tests/integration/traces/test_export_loaders.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import pytest

from rl.export import main
from rl.traces.export import inspect_log
from rollout.records import Record
from tests.export_kit import crowd, nested, repair, write

LOST = {"outcome": "infra_failure", "reason": "boot_failed", "reward": None, "detail": "no \x1b[31mbox", "flags": []}


def export(run: Path, *more: str) -> list[dict[str, Any]]:
    """Export a run, and return the members of each log."""
    out = run.parent / "out"
    assert main(["inspect", str(run), "--out", str(out), *more]) == 0
    logs = []
    for path in sorted(out.glob("*.eval")):
        with ZipFile(path) as file:
            logs.append({name.removesuffix(".json"): json.loads(file.read(name)) for name in file.namelist()})
    return logs


def of(record: Record, **changes: Any) -> Record:
    return msgspec.structs.replace(record, **changes)


def told(sample: dict[str, Any]) -> list[str]:
    """The events of a sample in their order, in short."""
    says = {"model": lambda one: f"reads {one['input_refs'][0][1] - one['input_refs'][0][0]}",
            "tool": lambda one: f"{one['function']} -> {one['result']}",
            "span_begin": lambda one: f"{one['name']} in {one['parent_id']}"}  # fmt: skip
    return [says.get(one["event"], lambda one: one["event"])(one) for one in sample["events"]]


async def test_a_sample_per_episode_of_which_those_of_a_task_are_epochs(tmp_path: Path) -> None:
    long = of(await repair("b", "Gave up.", 0.0), task="t1", agent={"status": "timeout"}, timing={"agent": 9.0})
    run = write(tmp_path / "run", of(await repair("a"), task="t1", step=3), long, of(await repair("c"), task="t2"))
    (log,) = export(run)
    names = ["samples/t1_epoch_1", "samples/t1_epoch_2", "samples/t2_epoch_1", "summaries", "header"]
    assert list(log) == names and [one["id"] for one in log["summaries"]] == ["t1", "t1", "t2"]
    first, second = log[names[0]], log[names[1]]
    assert first["scores"]["resolved"]["value"] == "C" and first["scores"]["reward"]["value"] == 1.0
    assert second["scores"]["resolved"] == {"value": "I", "answer": "tests_failed", "explanation": ""}
    assert second["limit"] == {"type": "time", "limit": 9.0} and first["limit"] is None
    assert [one["role"] for one in first["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
    ]
    thought, said = first["messages"][2]["content"]
    assert (thought["reasoning"], said["text"].strip(), first["input"]) == ("Hm.", "I look.", "fix it")
    assert told(first) == ["reads 2", "Bash -> total 0", "Bash -> content of a", "reads 6"]
    (read,) = [one["output"]["usage"] for one in first["events"] if one["event"] == "model" and len(one["tools"])]
    assert first["model_usage"]["policy"]["output_tokens"] > read["output_tokens"] > 0
    assert (first["metadata"]["episode"], first["metadata"]["step"], first["metadata"]["threads"]) == ("a", 3, ["main"])
    assert log["header"]["eval"]["model"] == "policy" and log["header"]["eval"]["config"] == {}
    assert [one["metrics"] for one in log["header"]["results"]["scores"]] == [
        {"accuracy": {"name": "accuracy", "value": 2 / 3}}, {"mean": {"name": "mean", "value": 2 / 3}},
    ]  # fmt: skip


async def test_sub_agents_are_spans_where_they_were_started(tmp_path: Path) -> None:
    (log,) = export(
        write(tmp_path / "run", of(await crowd("c"), task="t"), of(await nested("n"), task="u")), "--threads", "all"
    )
    assert told(log["samples/t_epoch_1"]) == [
        "side in None", "reads 2", "span_end", "reads 2", "Agent -> It is there.",
        "agent in None", "reads 2", "span_end", "reads 4", "reads 6", "reads 4", "reads 6",
    ]  # fmt: skip
    sample = log["samples/u_epoch_1"]
    assert told(sample) == [
        "reads 2", "Agent -> Outer.", "agent in None", "reads 2", "Agent -> Inner.", "agent in 1", "reads 2",
        "span_end", "reads 4", "span_end", "reads 4", "side in None", "reads 2", "span_end",
    ]  # fmt: skip
    assert log["header"]["eval"]["config"] == {"epochs": 1} and sample["metadata"]["threads"][-1] == "side"
    compacted = log["samples/t_epoch_1"]
    assert compacted["input"] == "fix it" and compacted["messages"][1]["content"] == "Summary of before."


async def test_what_the_infrastructure_failed_is_an_error_and_no_score(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = of(await repair("b"), nodes=[], rows=[], events=[], agent={}, counters={}, verdict=LOST)
    run = write(tmp_path / "run", of(await repair("a"), task="t"), of(nothing, task="t"),
                of(await crowd("c"), task="u", rows=[], verdict=LOST))  # fmt: skip
    (log,) = export(run)
    bare, failed = log["samples/t_epoch_2"], log["samples/u_epoch_1"]
    assert bare["scores"] is failed["scores"] is None and bare["error"]["message"] == r"boot_failed: no \x1b[31mbox"
    assert bare["messages"] == bare["events"] == [] and len(failed["messages"]) == 7
    (resolved, _) = log["header"]["results"]["scores"]
    assert (resolved["scored_samples"], resolved["unscored_samples"]) == (1, 2)
    assert resolved["metrics"]["accuracy"]["value"] == 1 and log["header"]["results"]["completed_samples"] == 1
    said = capfd.readouterr()
    assert "3 episodes exported, 0 of them unresolved" in said.out + said.err and "left out" not in said.err
    assert main(["messages", str(run), "--out", str(tmp_path / "plain")]) == 0
    assert "2 episodes not exported: infrastructure failure" in "".join(capfd.readouterr())


async def test_a_long_run_is_several_logs_and_what_is_new_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_log, "SAMPLES", 2)
    many = [of(await repair(f"e{n}"), task="t", started=float(n), split="val" if n == 4 else "train") for n in range(5)]
    run = write(tmp_path / "run", *many)
    logs = export(run)
    assert sorted(one["header"]["eval"]["task"].split("/")[-1] for one in logs) == ["train", "train", "val"]
    assert sorted(len(one["summaries"]) for one in logs) == [1, 2, 2]
    write(run, of(await repair("new"), task="t", split="train"), name="x")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    logs = export(run, "--append")
    assert len(logs) == 4 and names < {path.name for path in (tmp_path / "out").iterdir()}
    assert sum(len(one["summaries"]) for one in logs) == 6


async def test_a_prompt_is_shown_without_what_claude_code_puts_before_it(tmp_path: Path) -> None:
    prompt = "<system-reminder>Today is Monday.</system-reminder>\nfix it"
    (log,) = export(write(tmp_path / "run", of(await repair("e", prompt=prompt), task="t")))
    sample = log["samples/t_epoch_1"]
    assert sample["input"] == log["summaries"][0]["input"] == "fix it" and sample["messages"][1]["content"] == prompt


async def test_names_that_are_hostile_are_spelled_out(tmp_path: Path) -> None:
    task = "../a\x00b\x1b[31m"
    (log,) = export(write(tmp_path / "run\x1b", of(await repair("e"), task=task, model="/m/\x1b[2J")))
    spelled = r"../a\x00b\x1b[31m"
    assert f"samples/{spelled}_epoch_1" in log and log["header"]["eval"]["dataset"]["sample_ids"] == [spelled]
    assert "\x1b" not in log["header"]["eval"]["task"] + log["header"]["eval"]["model"]
    (path,) = (tmp_path / "out").glob("*.eval")
    assert path.name.isprintable()


async def test_what_the_agent_reports_falsely_makes_no_circle_of_spans(tmp_path: Path) -> None:
    record = await nested("n")
    names = [
        block["id"] for event in record.events for block in event["message"]["content"] if block["type"] == "tool_use"
    ]
    for event in record.events:
        if event.get("parent_tool_use_id") == names[0]:
            event["parent_tool_use_id"] = names[1]
    (log,) = export(write(tmp_path / "run", of(record, task="t")), "--threads", "all")
    begun = set()
    for one in log["samples/t_epoch_1"]["events"]:
        if one["event"] == "span_begin":
            assert one["parent_id"] is None or one["parent_id"] in begun
            begun.add(one["id"])


async def test_a_broken_record_that_the_infrastructure_failed_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = of(await repair("b"), verdict={"outcome": "infra_failure"}, rows=[])
    (log,) = export(write(tmp_path / "run", of(broken, task="t"), of(await repair("a"), task="t")))
    assert [one["metadata"]["episode"] for name, one in log.items() if name.startswith("samples/")] == ["a"]
    assert "not the record of an episode" in capsys.readouterr().err
