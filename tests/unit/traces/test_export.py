"""This module tests the command rl.export: rows and texts of each format, and what it refuses. The loaders of the
programs that the formats are for read them in tests/integration/traces/test_export_loaders.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest
import yaml

from rl.export import FORMATS, main
from rl.traces.ingest import atif as ingest_atif
from rl.traces.ingest import states
from rl.traces.ingest.lines import Findings
from rollout.records import Record, unpack_floats, unpack_ids
from tests.export_kit import CALLS, SYSTEM, crowd, lines, nested, repair, write
from tests.kit import full_at

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run of two tasks: a resolved and an unresolved episode of one, and one with sub-agents and a compaction."""
    records = [
        msgspec.structs.replace(await repair("a"), task="t1"),
        msgspec.structs.replace(await repair("b", "Gave up.", 0.0), task="t1"),
        msgspec.structs.replace(await crowd("c"), task="t2"),
    ]
    return write(tmp_path / "run", *records)


def export(run: Path, kind: str, *more: str) -> Path:
    out = run.parent / kind
    assert main([kind, str(run), "--out", str(out), *more]) == 0
    return out


def table(out: Path) -> list[dict[str, Any]]:
    """Read a parquet file as a user of Hugging Face's library does."""
    made = datasets.load_dataset("parquet", data_files=str(out / "train.parquet"), cache_dir=str(out / "hf"))
    return list(made["train"])


def test_messages(run: Path) -> None:
    rows = lines(export(run, "messages", "--threads", "all") / "messages.jsonl")
    assert [(row["episode"], row["thread"], row["sampled"]) for row in rows] == [
        ("a", "main", [2, 6]), ("b", "main", [2, 6]),
        ("c", "side", [2]), ("c", "agent", [2]), ("c", "main", [2, 4, 6]), ("c", "main", [4, 6]),
    ]  # fmt: skip
    assert rows[0]["messages"][2]["reasoning_content"] == "Hm." and rows[0]["resolved"] and not rows[1]["resolved"]
    assert rows[0]["messages"][:6] == rows[1]["messages"][:2] + [m for m in rows[0]["messages"][2:6]]
    assert [tool["function"]["name"] for tool in rows[0]["tools"]] == ["Bash", "Agent"]
    told = json.loads((run.parent / "messages" / "export.json").read_text())
    assert told["exported"] == ["a", "b", "c"] and told["rows"] == {"messages.jsonl": 6} and told["runs"] == [str(run)]


@pytest.mark.parametrize(
    ("threads", "kinds"), [("main", ["main"] * 4), ("agents", ["main", "main", "agent", "main", "main"])]
)
def test_threads_are_chosen(run: Path, threads: str, kinds: list[str]) -> None:
    rows = lines(export(run, "messages", "--threads", threads) / "messages.jsonl")
    assert [row["thread"] for row in rows] == kinds


def test_thinking_can_be_left_out(run: Path) -> None:
    rows = lines(export(run, "messages", "--no-thinking") / "messages.jsonl")
    assert "Hm." not in json.dumps(rows) and "reasoning_content" not in rows[0]["messages"][2]


def test_trl(run: Path) -> None:
    rows, plain = table(export(run, "trl")), lines(export(run, "messages") / "messages.jsonl")
    assert [row["messages"] for row in rows] == [row["messages"] for row in plain]  # no None for keys of others
    assert [json.loads(row["tools"]) for row in rows] == [row["tools"] for row in plain]


def test_trl_prompt_completion_has_each_reply_once(run: Path) -> None:
    rows = table(export(run, "trl-prompt-completion"))
    plain = lines(export(run, "messages") / "messages.jsonl")
    wanted = [(row["messages"][:n], [row["messages"][n]]) for row in plain for n in row["sampled"]]
    assert [(row["prompt"], row["completion"]) for row in rows] == wanted and len(rows) == 10


def test_pairs_are_of_one_task_and_begin_alike(run: Path) -> None:
    (row,) = table(export(run, "trl-preference"))
    plain = lines(export(run, "messages") / "messages.jsonl")
    good, bad = plain[0]["messages"], plain[1]["messages"]
    # The ids of the calls differ, what they say does not: the last reply is the first that differs.
    assert (row["prompt"], row["chosen"], row["rejected"]) == (good[:6], good[6:], bad[6:])


TURNS = [
    {"from": "human", "value": "fix it"},
    {
        "from": "gpt",
        "value": "<think>\nHm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls -l"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "cat \\"a\\""}}\n</tool_call>',
    },
    {"from": "observation", "value": "content of a\n</tool_response>\n<tool_response>\ntotal 0\n\nGo on."},
    {"from": "gpt", "value": "Done."},
]


def test_llamafactory(run: Path) -> None:
    out = export(run, "llamafactory", "--name", "mine", "learning_rate=0.5", "+flash_attn=fa2", "output_dir=else")
    rows = lines(out / "mine.jsonl")
    assert rows[0]["conversations"] == TURNS and rows[0]["system"] == SYSTEM and len(rows) == 5
    assert [tool["name"] for tool in json.loads(rows[0]["tools"])] == ["Bash", "Agent"]
    info = json.loads((out / "dataset_info.json").read_text())
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    assert info == {"mine": {"file_name": "mine.jsonl", "formatting": "sharegpt", "columns": columns}}
    train = yaml.safe_load((out / "train.yaml").read_text())
    assert (train["dataset"], train["dataset_dir"], train["stage"]) == ("mine", str(out), "sft")
    assert (train["learning_rate"], train["flash_attn"], train["output_dir"]) == (0.5, "fa2", "else")


def test_llamafactory_dpo(run: Path) -> None:
    out = export(run, "llamafactory-dpo")
    (row,) = lines(out / "episodes.jsonl")
    assert row["conversations"] == TURNS[:3] and row["chosen"] == TURNS[3]
    assert row["rejected"] == {"from": "gpt", "value": "Gave up."}
    assert json.loads((out / "dataset_info.json").read_text())["episodes"]["ranking"] is True
    train = yaml.safe_load((out / "train.yaml").read_text())
    assert (train["stage"], train["learning_rate"]) == ("dpo", 5e-6)


def test_swesmith_xml(run: Path) -> None:
    row = lines(export(run, "swesmith-xml") / "ft_xml.jsonl")[0]
    system, asked, reply, result, last = row["messages"]
    assert system["content"].startswith(SYSTEM) and "---- BEGIN FUNCTION #1: Bash ----" in system["content"]
    calls = [f"<function=Bash>\n<parameter=command>{c}</parameter>\n</function>" for c in ("ls -l", 'cat "a"')]
    assert reply["content"] == "\n\n".join(["<think>\nHm.\n</think>", "I look.", *calls])
    assert result == {"role": "user", "content": "content of a\n\ntotal 0\n\nGo on."}
    assert (asked["content"], last["content"]) == ("fix it", "Done.")
    assert {key: row[key] for key in row if key != "messages"} == {
        "instance_id": "t1", "resolved": True, "model": "policy", "traj_id": "a", "patch": "diff --git a/a b/a\n",
    }  # fmt: skip


async def test_atif(run: Path) -> None:
    import atif

    out = export(run, "atif")
    index = lines(out / "trajectories.jsonl")
    assert [row["episode"] for row in index] == ["a", "b", "c", "c"]
    read = [atif.Trajectory.model_validate_json((out / row["file"]).read_text()) for row in index]
    first, _, before, after = read
    system, asked, looked, more, last = first.steps
    assert [s.source for s in first.steps] == ["system", "user", "agent", "user", "agent"]
    assert (system.message, asked.message, more.message, last.message) == (SYSTEM, "fix it", "Go on.", "Done.")
    assert looked.message.strip() == "I look." and looked.reasoning_content == "Hm."
    answers = {result.source_call_id: result.content for result in looked.observation.results}
    assert [answers[call.tool_call_id] for call in looked.tool_calls] == ["total 0", "content of a"]
    record = await repair("a")  # equal but for the ids of calls
    node = record.nodes[1]
    assert looked.metrics.completion_token_ids == unpack_ids(node.ids) and len(CALLS) + 1 == node.length
    assert (
        looked.metrics.logprobs == unpack_floats(node.logprobs)
        and looked.metrics.prompt_tokens == record.nodes[0].length
    )
    (sub,) = before.subagent_trajectories
    (result,) = before.steps[2].observation.results
    assert (
        result.subagent_trajectory_ref[0].trajectory_id == sub.trajectory_id and sub.steps[-1].message == "I found it."
    )
    assert before.continued_trajectory_ref == Path(index[3]["file"]).name and after.continued_trajectory_ref is None
    assert [step.is_copied_context for step in after.steps if step.source == "agent"] == [True, None, None]
    problems: list[str] = []
    with states.writing(out.parent / "states.jsonl") as writer:
        ingest_atif.ingest(out, writer, Findings(problems.append), subagents=False)
    assert problems == [], "what an export wrote is read whole"


async def test_sub_agents_of_sub_agents_are_embedded_in_these(tmp_path: Path) -> None:
    import atif

    out = export(write(tmp_path / "run", await nested("a")), "atif", "--threads", "all")
    (path,) = (out / "trajectories").iterdir()
    main = atif.Trajectory.model_validate_json(path.read_text())
    outer, side = main.subagent_trajectories
    (inner,) = outer.subagent_trajectories
    assert [one.steps[-1].message for one in (main, outer, inner, side)] == ["Done.", "Outer.", "Inner.", "A title"]
    for one, sub in ((main, outer), (outer, inner)):
        (result,) = one.steps[2].observation.results
        assert [ref.trajectory_id for ref in result.subagent_trajectory_ref] == [sub.trajectory_id]


async def test_pairs_are_of_main_conversations_of_graded_episodes(tmp_path: Path) -> None:
    dry = {"outcome": "unresolved", "reason": "not_graded", "reward": None, "detail": ""}
    run = write(
        tmp_path / "run",
        await nested("a"),
        await nested("b", 0.0, "Gave up."),
        msgspec.structs.replace(await nested("c"), verdict=dry),
    )
    (row,) = table(export(run, "trl-preference"))
    assert [row[name][-1]["content"] for name in ("chosen", "rejected")] == ["Done.", "Gave up."]


async def test_the_model_that_has_played_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is called model says nothing: its run does."""
    place = tmp_path / "mine" / "iteration_1" / "model"
    run = write(tmp_path / "run", msgspec.structs.replace(await repair("a"), model=str(place)))
    train = yaml.safe_load((export(run, "llamafactory") / "train.yaml").read_text())
    assert train["model_name_or_path"] == str(place)
    (made,) = json.loads((export(run, "predictions") / "preds.json").read_text())
    assert made["model_name_or_path"] == "mine-iteration_1"
    write(run, msgspec.structs.replace(await repair("b"), model="another/model"), name="more")
    out = ["--out", str(tmp_path / "out")]
    assert main(["llamafactory", str(run), *out]) == 2
    assert "2 models have played; say with model_name_or_path=MODEL" in capsys.readouterr().err
    assert main(["llamafactory", str(run), *out, "model_name_or_path=x"]) == 0


async def test_an_episode_with_a_name_of_any_length_is_a_file(tmp_path: Path) -> None:
    names = [f"train-1-{'x' * 400}-{n}" for n in range(2)]
    run = write(tmp_path / "run", *[await repair(name) for name in names])
    out = export(run, "atif")
    assert [row["episode"] for row in lines(out / "trajectories.jsonl")] == names
    assert len(list((out / "trajectories").iterdir())) == 2


async def test_a_hosted_models_episode_has_what_it_was_told(tmp_path: Path) -> None:
    run = write(tmp_path / "run", await repair("a", hosted=True))
    out = export(run, "atif")
    made = json.loads((out / "trajectories" / "a.json").read_text())
    metrics = [step["metrics"] for step in made["steps"] if step["source"] == "agent"]
    assert metrics == [{"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 0}] * 2
    assert made["final_metrics"]["total_prompt_tokens"] == 14
    assert made["steps"][2]["timestamp"] == "1970-01-01T00:00:01+00:00"


def test_sessions_are_copied_as_they_are(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate("ab"):
        place = run / "traces" / "t1" / f"epoch_{number}"
        (place / "sessions" / "-box" / "s1" / "subagents").mkdir(parents=True)
        (place / "episode.json").write_text(json.dumps({"episode": name}))
        (place / "sessions" / "-box" / "s1.jsonl").write_text(f'{{"n": "{name}"}}\n')
        (place / "sessions" / "-box" / "s1" / "subagents" / "agent-1.jsonl").write_text("{}\n")
        for alone in ("hooks.jsonl", "of-no-folder.jsonl"):
            (place / "sessions" / alone).write_text("{}\n")
    from rl.data.select import main as select

    chosen = run.parent / "chosen"
    assert select([str(run), "--out", str(chosen)]) == 0
    for source in (run, chosen):  # a selection knows where they are
        out = run.parent / f"sessions-{source.name}"
        assert main(["sessions", str(source), "--out", str(out)]) == 0
        found = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.jsonl")}
        assert found == {
            "sessions/a/s1.jsonl": '{"n": "a"}\n', "sessions/a/s1/subagents/agent-1.jsonl": "{}\n",
            "sessions/b/s1.jsonl": '{"n": "b"}\n', "sessions/b/s1/subagents/agent-1.jsonl": "{}\n",
        }  # fmt: skip
        assert "tags: [agent-traces" in (out / "README.md").read_text()
        assert "c: no session files; collections have them" in capfd.readouterr().err


def test_predictions_are_one_per_task_and_of_one_model(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = export(run, "predictions")
    first, second = (json.loads((out / name).read_text()) for name in ("preds.json", "preds.1.json"))
    patch = "diff --git a/a b/a\n"
    assert first == [
        {"instance_id": task, "model_name_or_path": "policy", "model_patch": patch} for task in ("t1", "t2")
    ]
    assert [one["instance_id"] for one in second] == ["t1"]
    write(run, msgspec.structs.replace(first_of(run), episode="z", model="other"), name="more")
    assert main(["predictions", str(run), "--out", str(run.parent / "no")]) == 2
    assert "predictions are of one model, here are 2" in capfd.readouterr().err and not (run.parent / "no").exists()
    assert main(["predictions", str(run), "--out", str(run.parent / "yes"), "--name", "both"]) == 0
    (run / "episodes" / "more.cep").unlink()
    write(run, msgspec.structs.replace(first_of(run), episode="y", task="t3"), name="more")
    assert main(["predictions", str(run), "--out", str(out), "--append"]) == 0
    assert [one["instance_id"] for one in json.loads((out / "preds.json").read_text())] == ["t1", "t2", "t3"]


def first_of(run: Path) -> Record:
    from rollout.records.reading import Reader

    return next(iter(Reader(run)))


# --- what is refused, and what happens to an OUT that is there -------------------------------------------


@pytest.mark.parametrize("kind", ["messages", "trl", "llamafactory"])
async def test_append_adds_the_episodes_that_are_new(kind: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = export(run, kind)
    name = {"messages": "messages.jsonl", "trl": "train.parquet", "llamafactory": "episodes.jsonl"}[kind]

    def episodes() -> list[str]:
        rows = table(out) if kind == "trl" else lines(out / name)
        return [row["episode"] for row in rows]

    write(run, msgspec.structs.replace(await repair("d"), task="t3"), name="more")
    command = [kind, str(run), "--out", str(out)]
    assert main(command) == 2 and "is there already; add --overwrite or --append" in capfd.readouterr().err
    assert main([*command, "--append"]) == 0 and "3 episodes were exported before" in capfd.readouterr().out
    assert episodes() == ["a", "b", "c", "c", "c", "d"]
    assert json.loads((out / "export.json").read_text())["exported"] == ["a", "b", "c", "d"]
    before = {path: path.read_bytes() for path in out.rglob("*.json*")}
    assert main([*command, "--append"]) == 2 and "all episodes were exported before" in capfd.readouterr().err
    other = "llamafactory" if kind == "messages" else "messages"
    assert main([other, str(run), "--out", str(out), "--append"]) == 2
    assert f"{other} cannot be appended to it" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*.json*")} == before
    assert main([other, str(run), "--out", str(out), "--overwrite"]) == 0 and not (out / "train.parquet").exists()


async def test_a_second_data_set_is_added_beside_the_first(run: Path) -> None:
    out = export(run, "llamafactory")
    write(run, msgspec.structs.replace(await repair("d"), task="t3"), name="more")
    assert main(["llamafactory", str(run), "--out", str(out), "--append", "--name", "more"]) == 0
    assert sorted(json.loads((out / "dataset_info.json").read_text())) == ["episodes", "more"]
    assert [len(lines(out / f"{name}.jsonl")) for name in ("episodes", "more")] == [5, 1]


def test_what_is_no_export_is_not_touched(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = run.parent / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all")
    for mode in ("--overwrite", "--append"):
        assert main(["messages", str(run), "--out", str(mine), mode]) == 2
        assert "is no export, so it stays" in capfd.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["messages", "RUN", "learning_rate=1"],
            "learning_rate=1: neither a run nor, with messages, a key of train.yaml",
        ),
        (["llamafactory", "RUN", "learning_rat=1"], "learning_rat=1: "),
        (["llamafactory", "a=1"], "no RUN is given"),
        (["messages", "/nowhere"], "/nowhere: no such run directory or record file"),
        (["messages", "RUN", "--out", "RUN/out"], "is inside of a RUN"),
        (["llamafactory-dpo", "ONE"], "no episode could be exported"),
    ],
)
async def test_a_wrong_command_is_a_line_and_writes_nothing(
    arguments: list[str], said: str, run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rename(run.parent / "RUN")
    write(run.parent / "ONE", await repair("a"))
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    out = [] if "--out" in arguments else ["--out", "OUT"]
    assert main([*arguments, *out]) == 2
    err = capfd.readouterr().err
    assert said in err and err.startswith("error: ") and len(err.splitlines()) == 1
    assert sorted(run.parent.rglob("*")) == before


async def test_what_cannot_be_exported_is_named_and_the_rest_is(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A broken record, a foreign version, an episode without messages, a context that no template writes."""
    path = (
        write(run, msgspec.structs.replace(await repair("d"), version=9), await repair("e"), name="x")
        / "episodes"
        / "x.cep"
    )
    data = bytearray((run / "episodes" / "w.cep").read_bytes())
    data[30] ^= 1
    (run / "episodes" / "w.cep").write_bytes(data)
    evaluated = msgspec.structs.replace(await repair("f", hosted=True), calls=[], parts=[])
    write(run, evaluated, name="y")
    rows = lines(export(run, "messages") / "messages.jsonl")
    assert [row["episode"] for row in rows] == ["b", "c", "c", "c", "e"]
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 3 and all(line.startswith(f"left out: {run}/episodes/") for line in err)
    for place in (
        f"{path}, offset 0: record version 9",
        "w.cep, offset 0: the record's checksum",
        "neither tokens nor messages",
    ):
        assert sum(place in line for line in err) == 1, place


async def test_pairs_that_are_none_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write(
        tmp_path / "run",
        await repair("a"),
        await repair("b", "No.", 0.0, prompt="another"),
        msgspec.structs.replace(await repair("c"), task="u"),
        msgspec.structs.replace(await repair("d", reward=0.0), task="u"),
    )
    assert main(["trl-preference", str(run), "--out", str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err
    assert all(f"{name}: no unresolved episode of its task begins with the same prompt" in err for name in "ac")


def test_a_full_disk_leaves_what_was_there(run: Path) -> None:
    out = export(run, "predictions")
    before = {path: path.read_bytes() for path in out.iterdir()}
    big = msgspec.structs.replace(first_of(run), episode="z", task="t9", patch=os.urandom(30_000))
    write(run, big, name="big")
    command = [sys.executable, "-m", "rl.export", "predictions", str(run), "--out", str(out), "--append"]

    done = subprocess.run(full_at(20_000, command), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "stopped: " in done.stderr.splitlines()[-1]
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in run.parent.iterdir()) == ["predictions", "run"]


def test_the_help_names_every_format(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capfd.readouterr().out
    assert ended.value.code == 0 and all(f"    {name} " in said for name in FORMATS)
