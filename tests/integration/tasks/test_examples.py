"""Each directory of examples/, run as its README says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rewards.task import Task, load_tasks
from rewards.verdict import Reason
from rl.config.compose import compose
from rl.data import admit
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from
from rollout.agent import Status
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.integration.vllm_kit import Running
from tests.kit import CharTokenizer, char_policy

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def python(*argv: str | Path, path: Path = ROOT) -> str:
    """The output of a Python program that must succeed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{path}"}
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(repository: Path, *argv: str) -> None:
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    subprocess.run(["git", "-C", repository, *author, *argv], check=True)


def test_tasks_from_commits_are_admitted(tmp_path: Path) -> None:
    repository, out = tmp_path / "calc", tmp_path / "out"
    (repository / "tests").mkdir(parents=True)
    (repository / "conftest.py").touch()
    (repository / "calc.py").write_text("def mean(values):\n    return sum(values) / (len(values) + 1)\n")
    tests = "from calc import mean\n\n\ndef test_zero():\n    assert mean([0]) == 0\n"
    (repository / "tests" / "test_calc.py").write_text(tests)
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message=The first version")
    (repository / "calc.py").write_text("def mean(values):\n    return sum(values) / len(values)\n")
    tests += "\n\ndef test_mean():\n    assert mean([1, 2, 3]) == 2\n"
    (repository / "tests" / "test_calc.py").write_text(tests)
    git(repository, "commit", "--quiet", "--all", "--message=mean() divides by one too many")

    python(EXAMPLES / "own_tasks" / "make_tasks.py", repository, "HEAD", "--out", out)
    (task,) = load_tasks(out / "tasks.parquet")
    assert task.FAIL_TO_PASS == ("tests/test_calc.py::test_mean",)
    assert task.PASS_TO_PASS == ("tests/test_calc.py::test_zero",)
    assert task.problem_statement == "mean() divides by one too many"
    assert "test_mean" not in (task.snapshot / "tests" / "test_calc.py").read_text()
    admitted = out / "admitted.parquet"
    assert admit.main([str(out / "tasks.parquet"), "--out", str(admitted), "--tries", "1"]) == 0
    assert len(load_tasks(admitted)) == 1


def test_a_reward_is_tried(task: Task) -> None:
    directory = EXAMPLES / "own_reward"
    said = python(directory / "try_it.py", task.base_dir / "train.parquet", "careful:reward", path=directory)
    assert [line.split()[-1] for line in said.splitlines()] == ["0.95", "0.0"]


@pytest.mark.engine
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(900)
def test_the_proxy_alone_answers(vllm: Running) -> None:
    script = EXAMPLES / "proxy_alone" / "start.sh"
    environment = os.environ | {"PYTHON": sys.executable, "PORT": "0", "HF_HUB_OFFLINE": "1"}
    command = [script, vllm.model_dir, "qwen3_coder", vllm.url]
    program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        url = program.stdout.readline().split()[-1]
        body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode())
        reply = None
        end = time.monotonic() + 300
        while reply is None:
            try:
                with urllib.request.urlopen(request) as response:
                    reply = json.load(response)
            except urllib.error.HTTPError as error:
                assert error.code == 529 and time.monotonic() < end, error.read()  # it is still loading
                time.sleep(0.5)
        assert reply["type"] == "message" and reply["usage"]["output_tokens"] <= 10
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(60)


async def test_an_agent_of_its_own_plays(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, installed = tmp_path / "own_agent", tmp_path / "installed"
    shutil.copytree(EXAMPLES / "own_agent", source)  # pip builds in place
    how = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    python("-m", "pip", "install", *how, "--target", installed, source)
    monkeypatch.syspath_prepend(installed)
    config = compose(["agent=shell", "agent.max_turns=5", "sandbox=local"], "evaluate")
    agent = agent_from(config, max_tokens=500, max_context=10_000)
    script = in_turn(call("Bash", command="printf 'x = 1\n' >> main.py; env"), call("Bash", command="false"), "Done.")
    proxy = ProxyServer()
    await proxy.start()
    try:
        boot = kind_of(config.sandbox).boot(agent)
        setup = Setup(char_policy(scripted(script)), proxy, boot, agent)
        episode = await run_episode(setup, task, "e")
    finally:
        await proxy.stop()
    assert episode.agent is not None and (episode.agent.status, episode.agent.turns) == (Status.FINISHED, 3)
    assert episode.patch.endswith(b"+x = 1\n") and episode.verdict.reason is Reason.TESTS_FAILED
    check_record(episode, tmp_path)
    (row,) = episode.rows
    read = CharTokenizer().decode(row.prompt_ids + row.response_ids)
    assert "exit status 1" in read and "MAX_TURNS=5" in read and "PROXY_" not in read
