"""This module tests how Harbor's tasks become rows. Its own models say the same, where the package is installed."""

from __future__ import annotations

import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import docker
import pytest
from docker.errors import ImageNotFound
from omegaconf import OmegaConf

from rewards.harbor import Harbor, _files
from rewards.rules import Rules
from rewards.task import Task, TaskError, load_tasks
from rl.config.compose import ConfigError
from rl.data import convert, harbor, harbor_images
from rl.data.fields import RowError, Why
from rl.data.rates import write_rows
from rl.data.sets import ConversionOptions
from rl.episodes.boxes import FromImages, Local, _at_least
from rollout.sandbox import Limits
from rollout.sandbox.docker.engine import ContainerEngine
from tests.harbor_kit import write_task, write_tasks


def converted(directory: Path, **options: Any) -> dict[str, Any]:
    row = {"instance_id": directory.name, "path": str(directory)}
    return harbor.convert(row, ConversionOptions({}, out=directory.parent, **options))


def test_tasks_are_converted_or_refused(tmp_path: Path) -> None:
    becomes = write_tasks(tmp_path / "all", "base:1")
    assert convert.main(["harbor", str(tmp_path / "all"), "--out", str(tmp_path / "rows" / "t.parquet")]) == 0
    report = json.loads((tmp_path / "rows" / "t.convert.json").read_text())
    assert {one["instance_id"]: one["why"] for one in report["rows"]} == dict.fromkeys(
        ("network", "staged"), "unsupported"
    )
    tasks = {task.instance_id: task for task in load_tasks(tmp_path / "rows" / "t.parquet")}
    assert set(tasks) == {name for name, what in becomes.items() if what != "unsupported"}
    shell, partial = tasks["made__shell"], tasks["partial"]
    assert (shell.repo, shell.difficulty, shell.grader) == ("made/shell", "easy", "harbor")
    assert shell.directory == tmp_path / "all" / "plain" / "shell"
    assert shell.asked["mode"] == "shared" and shell.asked["timeout_s"] == 600.0
    assert tasks["separate"].asked["mode"] == "separate" and tasks["separate"].asked["timeout_s"] == 120.0
    assert tasks["shared"].problem_statement == "half(3) must be 1.5.\n"  # without the canary
    assert partial.limits == {"cpus": 1, "memory_mb": 2048, "disk_mb": 512}
    for task in tasks.values():  # hidden tests are in no row
        assert "reward.txt" not in json.dumps(task.to_row()) and "/tests" not in task.image


def test_rows_that_move_find_their_tests(tmp_path: Path) -> None:
    write_task(tmp_path / "all", "one")
    source, out = tmp_path / "t.parquet", tmp_path / "deep" / "down" / "u.parquet"
    assert convert.main(["harbor", str(tmp_path / "all"), "--out", str(source)]) == 0
    out.parent.mkdir(parents=True)
    write_rows(source, out, load_tasks(source), ["one"], {})
    (task,) = load_tasks(out)
    assert task.directory == tmp_path / "all" / "one"
    (task.directory / "solution" / "solve.sh").write_text("echo other\n")
    with pytest.raises(TaskError, match="have changed since"):
        load_tasks(out)


def test_rows_behind_a_link_find_their_tests(tmp_path: Path) -> None:
    """On clusters `data` is usually a link to another disk."""
    write_task(tmp_path / "all", "one")
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk" / "deep")
    out = tmp_path / "data" / "t.parquet"
    assert convert.main(["harbor", str(tmp_path / "all"), "--out", str(out)]) == 0
    assert [task.directory for task in load_tasks(out)] == [tmp_path / "all" / "one"]


def test_directories_are_found_down_to_six_levels(tmp_path: Path) -> None:
    write_task(tmp_path, "1/2/3/4/5/six")
    write_task(tmp_path, "1/2/3/4/5/6/seven")
    write_task(tmp_path, "1/2/3/4/5/six/within")
    assert [row["instance_id"] for row in harbor.rows(str(tmp_path), None)] == ["six"]
    with pytest.raises(ValueError, match=r"down to 6 levels, has a task.toml"):
        list(harbor.rows(str(tmp_path / "1/2/3/4/5/6/seven/tests"), None))


BASE = "[environment]\nnetwork_mode = 'no-network'\n"


@pytest.mark.parametrize(
    ("toml", "why", "said"),
    [
        (
            "",
            Why.UNSUPPORTED,
            "the agent has network_mode 'public' and the verifier has network_mode 'public', and boxes",
        ),
        ("[environment]\nallow_internet = true\n", Why.UNSUPPORTED, "the agent has network_mode 'public'"),
        (
            f"{BASE}[verifier]\nnetwork_mode = 'allowlist'\n",
            Why.UNSUPPORTED,
            "the verifier has network_mode 'allowlist'",
        ),
        ("[environment]\nnetwork_mode = 'none'\n", Why.INVALID, "network_mode is 'none'"),
        (f"{BASE}os = 'Windows'\n", Why.UNSUPPORTED, "[environment] os = 'windows'"),
        (f"{BASE}gpus = 1\n", Why.UNSUPPORTED, "GPUs"),
        (f"{BASE}[[environment.mcp_servers]]\nname = 'x'\n", Why.UNSUPPORTED, "MCP servers"),
        (f"{BASE}skills_dir = '/skills'\n", Why.UNSUPPORTED, "skills_dir"),
        (f"{BASE}[environment.healthcheck]\ncommand = 'true'\n", Why.UNSUPPORTED, "a healthcheck"),
        (f"{BASE}[environment.env]\nKEY = '${{KEY:-1}}'\n", Why.UNSUPPORTED, "[environment.env] KEY"),
        (f'{BASE}[environment.env]\nKEY = "a\\nUSER root"\n', Why.INVALID, "[environment.env] 'KEY'"),
        (f'{BASE}[verifier.env]\n"A B" = "1"\n', Why.INVALID, "[verifier.env] 'A B'"),
        (f"{BASE}[verifier.env]\nKEY = 1\n", Why.INVALID, "[verifier.env] KEY is 1"),
        (f"{BASE}[verifier]\nuser = 'root'\n", Why.UNSUPPORTED, "[verifier] user"),
        (f"{BASE}[agent]\nuser = 1000\n", Why.UNSUPPORTED, "[agent] user"),
        (f"{BASE}[[verifier.collect]]\ncommand = 'true'\n", Why.UNSUPPORTED, "[verifier] collect"),
        (f"{BASE}[[steps]]\nname = '../a'\n", Why.INVALID, "[[steps]] name is '../a'"),
        (f"{BASE}[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'\n", Why.INVALID, "two [[steps]]"),
        (f"steps = 1\n{BASE}", Why.INVALID, "[[steps]] name is None"),
        (f"{BASE}[[steps]]\nname = 'a'\n[steps.healthcheck]\ncommand = 'x'\n", Why.UNSUPPORTED, "a healthcheck"),
        (f"{BASE}[[steps]]\nname = 'a'\n[steps.agent]\nuser = 'x'\n", Why.UNSUPPORTED, "[agent] user"),
        (f"{BASE}[verifier]\nenvironment_mode = 'both'\n", Why.INVALID, "[verifier] environment_mode is 'both'"),
        (
            f"{BASE}[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1\n",
            Why.INVALID,
            "[verifier]",
        ),
        (
            f"{BASE}[verifier.environment]\ndocker_image = 'x'\nnetwork_mode = 'no-network'\n",
            Why.UNSUPPORTED,
            "the verifier",
        ),
        (
            f"artifacts = ['/etc/x']\n{BASE}[verifier]\nenvironment_mode = 'separate'\n",
            Why.UNSUPPORTED,
            "the artifact /etc/x",
        ),
        (
            f"artifacts = [{{source = '/', exclude = ['[a']}}]\n{BASE}[verifier]\nenvironment_mode = 'separate'\n",
            Why.UNSUPPORTED,
            "the artifact {'source'",
        ),
        (f"{BASE}[verifier]\nenvironment_mode = 'separate'\n", Why.UNSUPPORTED, "a separate verifier without"),
        (f"{BASE}memory = '2 pounds'\n", Why.INVALID, "memory is '2 pounds'"),
        (f"{BASE}memory = '2G'\nmemory_mb = 1\n", Why.INVALID, "memory and memory_mb are not the same"),
        (f"{BASE}cpus = -1\n", Why.INVALID, "cpus is -1"),
        (f"{BASE}docker_image = 7\n", Why.INVALID, "docker_image is 7"),
        (f"schema_version = '2.0'\n{BASE}", Why.UNSUPPORTED, "schema_version is 2.0"),
        ("environment = 1\n", Why.INVALID, "environment is no table"),
        ("[environment\n", Why.INVALID, "task.toml: "),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_reason(tmp_path: Path, toml: str, why: Why, said: str) -> None:
    with pytest.raises(RowError) as caught:
        converted(write_task(tmp_path, "one", toml=toml))
    assert caught.value.why is why and caught.value.detail.startswith(said), caught.value


@pytest.mark.parametrize(
    ("artifacts", "left"),
    [
        ('"/app/"', "a.log b/c b/out/d e.txt"),
        ('"/app/b/out", "e.txt", "none"', "b/out/d e.txt"),
        ('{source = "/app", exclude = ["*.log", "out", "b/c"]}', "e.txt"),
        ('"/app/b", {source = "/app/none", exclude = ["c", "out"]}', "b/c b/out/d"),
        ('{source = "/app", exclude = [5]}', "a.log b/c b/out/d e.txt"),
        ('"/app/e.txt", {source = "/app/b", exclude = ["./out"]}', "b/c e.txt"),
    ],
)
def test_what_is_no_artifact_does_not_get_to_a_separate_verifier(tmp_path: Path, artifacts: str, left: str) -> None:
    apart = f'artifacts = [{artifacts}]\n{BASE}workdir = "/app"\n[verifier]\nenvironment_mode = "separate"\n'
    row = converted(write_task(tmp_path, "one", toml=apart))
    new = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+1\n"
    paths = ["a.log", "b/c", "b/out/d", "e.txt"]
    patch = Rules().screen(Task.from_row(row, tmp_path), "".join(map(new.format, paths)).encode())
    rest = patch.dropping(Rules(row["grading"]["drop"]))
    assert [file.path for file in rest.files] == left.split()
    assert rest.dropped == tuple(path for path in paths if path not in left.split())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"test": None}, Why.NO_RECIPE),
        ({"dockerfile": None}, Why.NO_IMAGE),
        ({"instruction": "# canary\n\n"}, Why.NO_STATEMENT),
        ({"files": {"environment/docker-compose.yaml": ""}}, Why.UNSUPPORTED),
        ({"files": {"tests/.harborignore": ""}}, Why.UNSUPPORTED),
        ({"files": {"trajectory.json": "{}"}}, Why.UNSUPPORTED),
    ],
)
def test_directories_that_lack_something(tmp_path: Path, changes: dict[str, Any], why: Why) -> None:
    with pytest.raises(RowError) as caught:
        converted(write_task(tmp_path, "one", **changes))
    assert caught.value.why is why


def test_steps_have_the_tasks_settings_and_their_own(tmp_path: Path) -> None:
    about = '[verifier]\ntimeout_sec = 70.0\nenv = { A = "1", B = "1" }\n'
    about += '[[steps]]\nname = "a"\nmin_reward = { reward = 0.5 }\n'
    about += '[steps.verifier]\ntimeout_sec = 9.0\nenv = { B = "2" }\n[[steps]]\nname = "b"\n'
    files = {f"steps/{name}/instruction.md": f"# canary\n\n{name}\n" for name in "ab"}
    files["steps/b/tests/more"] = files["steps/b/solution/no"] = "x"
    directory = write_task(tmp_path, "one", toml=f"{BASE}{about}", files=files)
    row = converted(directory)
    assert row["problem_statement"] == "a\n\n\nb\n"
    asked = row["grading"]
    assert (asked["mode"], asked["strategy"], asked["solution"]) == ("separate", "mean", False)
    a, b = asked["steps"]
    assert (a["timeout_s"], a["env"], a["min_reward"], a["solution"]) == (9.0, {"A": "1", "B": "2"}, 0.5, True)
    assert (b["timeout_s"], b["env"], b["min_reward"], b["solution"]) == (70.0, {"A": "1", "B": "1"}, None, False)
    task = Task.from_row(row, tmp_path)
    first, second = Harbor().steps(task)
    assert (first.problem_statement, second.problem_statement) == ("a\n", "b\n")
    assert Harbor().timeout_s(first, 1) == 9.0 and Harbor().steps(first) == [first]
    assert not Harbor().shares(task) and not Harbor().solvable(task)
    assert set(_files(first)["tests"]) == {"test.sh"} and set(_files(second)["tests"]) == {"test.sh", "more"}
    assert set(_files(first)["solution"]) == {"solve.sh"} and set(_files(second)["solution"]) == {"no"}
    with pytest.raises(RowError, match="min_reward of 'reward', but the reward that counts is 'style'"):
        converted(directory, reward="style")
    (directory / "steps" / "b" / "tests" / "more").write_text("y")
    with pytest.raises(TaskError, match="have changed since"):
        Task.from_row(row, tmp_path)
    with pytest.raises(RowError, match="multi_step_reward_strategy is 'best'"):
        converted(write_task(tmp_path, "two", toml=f"multi_step_reward_strategy = 'best'\n{BASE}{about}", files=files))


def test_links_are_refused(tmp_path: Path) -> None:
    directory = write_task(tmp_path, "one")
    (directory / "tests" / "more").symlink_to("/etc/passwd")
    with pytest.raises(RowError, match="neither a file nor a directory"):
        converted(directory)
    for name, said in (("tests", "tests is neither a file nor a directory"), ("instruction.md", "is a link")):
        directory = write_task(tmp_path, f"of-{name}")
        (directory / name).rename(tmp_path / f"elsewhere-{name}")
        (directory / name).symlink_to(tmp_path / f"elsewhere-{name}")
        with pytest.raises(RowError, match=said):
            converted(directory)


def test_options_decide_what_counts_and_what_is_allowed(tmp_path: Path) -> None:
    directory = write_task(tmp_path, "one", toml="[environment]\nallow_internet = true\n")
    assert convert._parser().parse_args(["harbor", "--out", "o", "--threshold", "1"]).threshold == 1.0
    grading = converted(directory, without_network=True, reward="style", threshold=0.5)["grading"]
    assert (grading["reward"], grading["threshold"]) == ("style", 0.5)
    assert grading["network"].endswith("; the boxes have none")


def test_an_image_is_named_by_all_that_it_is_made_of(tmp_path: Path) -> None:
    directory = write_task(tmp_path, "One Task")
    names = [harbor.image_name(directory, {})]
    assert names[0].startswith("claude-code-rl/harbor:one-task-")
    names += [harbor.image_name(directory, about) for about in ({"workdir": "/x"}, {"docker_image": "y"})]
    (directory / "environment" / "data").write_text("1")
    names.append(harbor.image_name(directory, {}))
    (directory / "environment" / "data").chmod(0o755)
    names.append(harbor.image_name(directory, {}))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("says", [b"", b'{"stream": "Step 1/2"}'])
def test_a_build_that_stands_still_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    """The other tasks get their images: what ends is this build, be it before the engine's first word or after it."""
    directory = write_task(tmp_path, "one", toml=f"{BASE}build_timeout_sec = 0.5\n")
    task = Task.from_row(converted(directory), tmp_path)

    class Standing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if says:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(says), says))
            ended.wait()

        def log_message(self, *about: Any) -> None:
            pass

    monkeypatch.setattr(harbor_images.images, "missing", lambda engine, names: names)
    ended, engine = threading.Event(), ThreadingHTTPServer(("127.0.0.1", 0), Standing)
    threading.Thread(target=engine.serve_forever).start()
    try:
        client = docker.APIClient(f"tcp://127.0.0.1:{engine.server_port}", version="1.41")
        with pytest.raises(harbor_images.BuildFailed, match=r"not built after 0.5 s"):
            harbor_images.build(cast("ContainerEngine", SimpleNamespace(client=client)), task)
        client.close()
    finally:
        ended.set()
        engine.shutdown()
        engine.server_close()


def test_an_image_is_built_of_what_was_converted_only(tmp_path: Path) -> None:
    """Its name has the hash of it: another node would find another image under the same name."""
    directory = write_task(tmp_path, "one", toml=f"{BASE}[environment.env]\nB = '1'\nA = '2'\n")
    task = Task.from_row(converted(directory), tmp_path)
    engine: Any = SimpleNamespace(client=SimpleNamespace(inspect_image=lambda name: {}))
    assert not harbor_images.build(engine, task)
    engine.client.inspect_image = Mock(side_effect=ImageNotFound("none"))
    (directory / "environment" / "Dockerfile").write_text("FROM other\n")
    with pytest.raises(harbor_images.BuildFailed, match="convert it again"):
        harbor_images.build(engine, task)


def test_a_box_has_at_least_what_its_task_wants() -> None:
    limits = Limits(memory_bytes=4 << 30, cpus=2.0)
    assert _at_least(limits, {}) == limits
    more = _at_least(limits, {"memory_mb": 8192, "cpus": 1, "disk_mb": 1})
    assert (more.memory_bytes, more.cpus, more.disk_bytes) == (8 << 30, 2.0, limits.disk_bytes)


def test_boxes_that_cannot_take_the_tests_are_refused(tmp_path: Path) -> None:
    class Images(FromImages):
        pass

    write_task(tmp_path / "all", "one")
    assert convert.main(["harbor", str(tmp_path / "all"), "--out", str(tmp_path / "t.parquet")]) == 0
    tasks, sandbox = load_tasks(tmp_path / "t.parquet"), OmegaConf.create({"base_image": None})
    with pytest.raises(ConfigError, match="the grader harbor cannot put its tests into boxes of sandbox=images"):
        Images(sandbox).check_tasks(tasks)
    with pytest.raises(ConfigError, match="one needs boxes made from its image"):
        Local(sandbox).check_tasks(tasks)


@pytest.mark.skipif(not importlib.util.find_spec("harbor"), reason="harbor is not installed")
def test_harbors_own_models_read_the_same(tmp_path: Path) -> None:
    from harbor.models.task.task import Task as Theirs  # ty: ignore[unresolved-import]
    from harbor.models.task.verifier_mode import resolve_task_verifier_mode  # ty: ignore[unresolved-import]

    write_tasks(tmp_path, "base:1")
    for row in harbor.rows(str(tmp_path), None):
        theirs = Theirs(row["path"])
        if theirs.has_steps:
            if theirs.paths.step_workdir_dir("one").exists():
                continue
            ours = harbor.convert(row, ConversionOptions({}, out=tmp_path))["grading"]
            for step, their in zip(ours["steps"], theirs.config.steps, strict=True):
                assert (step["name"], step["min_reward"]) == (their.name, their.min_reward)
                assert step["statement"] == theirs.step_instruction(their.name)
                assert step["timeout_s"] == their.verifier.timeout_sec
            continue
        ours = harbor.convert(row, ConversionOptions({}, out=tmp_path, without_network=True))
        about, grading = theirs.config, ours["grading"]
        assert ours["repo"] == theirs.name and ours["problem_statement"] == theirs.instruction
        assert grading["mode"] == resolve_task_verifier_mode(about).value
        assert grading["timeout_s"] == about.verifier.timeout_sec and grading["env"] == about.verifier.env
        environment = about.environment
        wanted = {"cpus": environment.cpus, "memory_mb": environment.memory_mb, "disk_mb": environment.storage_mb}
        assert grading["limits"] == {name: value for name, value in wanted.items() if value}
        assert grading["environment"]["workdir"] == environment.workdir
        assert (grading["network"] == "") == (environment.network_mode.value == "no-network")
