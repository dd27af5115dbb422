"""Harbor's tasks from their directories to episodes, in containers: converted, built, admitted, played."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.grade import IN_THE_AGENTS_BOX, grade
from rewards.task import Task, load_tasks
from rewards.verdict import Reason
from rl.config.compose import compose
from rl.data import admit, convert, export, images
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from
from rl.quickstart.tasks import make_tasks
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.sandbox.docker.engine import get_engine
from tests.docker_kit import base_image, left
from tests.harbor_kit import NO_NETWORK, write_task, write_tasks
from tests.integration.claude_kit import call, check_record, in_turn
from tests.integration.harbor_plays import played
from tests.packages_kit import install
from tests.sandboxes import REPOSITORY, sh

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def becomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The kit's tasks with their images, as a file; and what becomes of each."""
    place = tmp_path_factory.mktemp("harbor")
    expected = write_tasks(place / "all", base_image())
    write_task(place / "all", "unbuilt", base="no/such:image")
    write_task(place / "all", "misspelt", base=f"{base_image()}\nRAN nothing")
    write_task(place / "all", "at-the-root", base=base_image(), toml=f'{NO_NETWORK}workdir = "/"\n')
    assert convert.main(["harbor", str(place / "all"), "--out", str(place / "rows.parquet")]) == 0
    assert images.main([str(place / "rows.parquet"), "--out", str(place / "built.parquet")]) == 0
    yield place / "built.parquet", expected
    assert left(get_engine()) == []


@pytest.fixture(scope="module")
def tasks(becomes: tuple[Path, dict[str, str]]) -> dict[str, Task]:
    return {task.instance_id: task for task in load_tasks(becomes[0])}


def test_tasks_are_admitted_or_refused(
    becomes: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, expected = becomes
    built = {name for name, what in expected.items() if what != "unsupported"}
    assert {task.instance_id for task in load_tasks(file)} == built  # and those without an image are left out
    out = tmp_path / "admitted.parquet"
    assert admit.main([str(file), "--out", str(out), "--tries", "1", "--jobs", "2", "sandbox=docker"]) == 0
    assert {task.instance_id for task in load_tasks(out)} == {name for name in built if expected[name] == "pass"}
    assert "2 broken" in capsys.readouterr().out


def test_local_boxes_are_refused_in_one_line(
    becomes: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admit.main([str(becomes[0]), "--out", str(tmp_path / "no.parquet"), "sandbox=local"]) == 2
    assert "needs boxes made from its image, as sandbox=docker makes them, not local" in capsys.readouterr().err


async def test_a_box_is_as_its_task_says(tasks: dict[str, Task]) -> None:
    boot = kind_of(compose(["sandbox=docker", "sandbox.memory_mb=512"], "evaluate").sandbox).boot()
    for name, workdir, memory in (("partial", "/app", 2048), ("given", "/srv/work", 512), ("separate", "/app", 512)):
        box = await boot(tasks[name], None)
        try:
            said = await sh(box, "pwd; git log --oneline 2>/dev/null | wc -l; ls /tests /solution; touch new")
            assert said.stdout.decode().split() == [workdir, "1" if name == "separate" else "0"]
            info = get_engine().client.inspect_container(box.container)  # type: ignore[attr-defined]
            assert info["HostConfig"]["Memory"] == memory << 20
            assert b"diff --git a/new b/new" in await box.diff()
        finally:
            await box.close()


async def test_a_part_of_the_work_has_a_part_of_the_reward(tasks: dict[str, Task]) -> None:
    boot = kind_of(compose(["sandbox=docker"], "evaluate").sandbox).boot()
    box = await boot(tasks["partial"], None)
    try:
        await sh(box, "touch a")
        await box.diff()
        verdict = await grade(tasks["partial"], b"", functools.partial(boot, tasks["partial"], None), box, timeout_s=60)
    finally:
        await box.close()
    assert (verdict.reason, verdict.reward) == (Reason.TESTS_FAILED, 0.5)


async def test_a_scripted_agent_plays_one(
    tasks: dict[str, Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(REPOSITORY / "examples" / "own_agent", tmp_path / "agent", monkeypatch)
    agent = agent_from(compose(["agent=shell", "sandbox=docker"], "evaluate"), max_tokens=5000, max_context=50_000)
    looks = call("Bash", command="ls /tests /solution /logs; echo bye >greeting.txt")
    episode = await played(tasks["made__shell"], agent, in_turn(looks, "Done."))
    assert episode.verdict.reason is None and IN_THE_AGENTS_BOX in episode.verdict.flags, episode.verdict
    assert b"+bye" in episode.patch
    check_record(episode, tmp_path / "record")
    episode = await played(tasks["made__shell"], agent, in_turn("I do nothing."))
    assert (episode.verdict.reason, episode.verdict.reward) == (Reason.TESTS_FAILED, 0.0)


async def test_claude_code_plays_steps(tasks: dict[str, Task], tmp_path: Path) -> None:
    agent = ClaudeCode(find_binary(None), 8, 90, 2000, system_prompt="Do.", tools=("Bash",), bare=True)
    hi, bye = (
        call("Bash", command=f"ls /tests /logs; {what}") for what in ("echo hi >first.txt", "echo bye >greeting.txt")
    )
    episode = await played(tasks["steps"], agent, in_turn(hi, "Done.", bye, "Done."))
    assert (episode.verdict.reason, episode.verdict.reward) == (None, 1.0), episode.verdict
    assert IN_THE_AGENTS_BOX not in episode.verdict.flags
    record = check_record(episode, tmp_path / "both")
    (row,) = record.rows
    assert len(row.nodes) == 4
    read = b"".join(node.says for node in record.nodes).decode()
    assert read.count("cannot access '/tests'") == 2  # also after the first step was graded
    episode = await played(tasks["steps"], agent, in_turn("No.", bye, "Done."))
    assert (episode.verdict.reason, episode.verdict.reward) == (Reason.EMPTY_PATCH, 0.0), episode.verdict
    check_record(episode, tmp_path / "none")


def test_exported_tasks_are_read_back_and_admitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tasks(tmp_path / "made", 3, n_train=1, n_heldout=1)
    file = tmp_path / "made" / "train.parquet"
    names = [str(tmp_path / f"{name}.parquet") for name in ("rows", "built", "admitted")]
    assert export.main([str(file), "--base", base_image(), "--out", str(tmp_path / "out")]) == 0
    assert convert.main(["harbor", str(tmp_path / "out"), "--out", names[0]]) == 0
    assert images.main([names[0], "--out", names[1]]) == 0
    assert admit.main([names[1], "--out", names[2], "--tries", "1", "sandbox=docker"]) == 0
    assert len(load_tasks(names[2])) == 1, capsys.readouterr().out  # solve.sh resolves it, and an empty run does not


async def test_claude_code_plays_both_modes(tasks: dict[str, Task], tmp_path: Path) -> None:
    tools = ("Bash", "Edit", "Read")
    agent = ClaudeCode(find_binary(None), 8, 90, 2000, system_prompt="Repair the code.", tools=tools, bare=True)
    for name in ("separate", "shared"):
        script = in_turn(call("Bash", command="sed -i 's|//|/|' calculator.py"), "Done.")
        episode = await played(tasks[name], agent, script)
        assert episode.verdict.reason is None, episode.verdict
        assert (IN_THE_AGENTS_BOX in episode.verdict.flags) is (name == "shared")
        check_record(episode, tmp_path / name)
