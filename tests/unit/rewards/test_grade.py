"""This module tests verdicts, and the grader with a scripted sandbox; tests/integration has real ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewards.apart import apart
from rewards.grade import grade
from rewards.rules import Rules
from rewards.task import Task, _parsers_in_source, log_parsers
from rewards.verdict import Outcome, Reason, Verdict
from rollout.sandbox import OUTPUT_CAP, ExecResult, SandboxError

ROOT = Path(__file__).parents[3]
START, END = "+ : '>>>>> Start Test Output'\n", "+ : '>>>>> End Test Output'\n"
CODE = ">>>>> Test Exit Code: {}\n"
PATCH = b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n"


def task(tmp: Path = Path("/"), **changes: str) -> Task:
    script = "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"
    row = {
        "instance_id": "a__b-1",
        "image": "dir:repos/a",
        "repo": "a/b",
        "version": "1",
        "FAIL_TO_PASS": '["t.py::new"]',
        "PASS_TO_PASS": '["t.py::old"]',
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": script,
        "problem_statement": "Fix it.",
        "base_commit": "",
    }
    return Task.from_row(row | changes, tmp)


class ScriptedBox:
    """Takes the eval script and the patch. `apply` is the exit status of `git apply`, -1 if it does not end; `log` is
    what the script prints."""

    workdir, home, tmpdir = "/testbed", "/home/agent", "/tmp"

    def __init__(self, log: str | Exception = "", apply: int = 0, timed_out: bool = False) -> None:
        self.log, self.apply, self.timed_out = log, apply, timed_out
        self.script = self.program = self.patch = b""
        self.closed = 0
        self.runs = 0

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        self.runs += 1
        word, length, more, *apply = argv[argv.index("grading") + 1 :]
        at, end = int(length), int(length) + int(more)
        self.script, self.program, self.patch = stdin[:at], stdin[at:end], stdin[end:]
        out = word.encode()
        if apply:
            if self.apply:
                late = self.apply < 0
                return ExecResult(None if late else self.apply, out, b"error: no", late, False, 0.1)
            out += b"0\t0\tx\0"
        if isinstance(self.log, Exception):
            raise self.log
        out += word.encode() + self.log.encode()
        return ExecResult(None if self.timed_out else 0, out, b"", self.timed_out, False, 0.1)

    async def put(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    async def get(self, path: str) -> bytes:
        raise NotImplementedError

    async def diff(self) -> bytes:
        return b""

    async def close(self) -> None:
        self.closed += 1


async def graded(box: ScriptedBox, patch: bytes = PATCH, of: Task | None = None, **options: Any) -> Verdict:
    async def boot() -> ScriptedBox:
        return box

    return await grade(of or task(), patch, boot, timeout_s=9, **options)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (START + "PASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(0), None),
        (START + "PASSED t.py::new\nFAILED t.py::old\n" + END + CODE.format(1), Reason.TESTS_FAILED),
        (START + "PASSED t.py::old\n" + END + CODE.format(0), Reason.TESTS_FAILED),
        (START + "PASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(1), Reason.LOG_UNPARSABLE),
        (START + "no results\n" + END + CODE.format(0), Reason.LOG_UNPARSABLE),
        (START + "PASSED t.py::new\nPASSED t.py::old\n", Reason.LOG_UNPARSABLE),
        ("", Reason.LOG_UNPARSABLE),
        ("Cannot allocate memory\nCould not resolve host\n", Reason.LOG_UNPARSABLE),
        (START + "PASSED t.py::new\nPASSED t.py::old\n" + END + "x" + END, Reason.LOG_FORGED),
        (START + START + END, Reason.LOG_FORGED),
        # Lines that the tested code prints after pytest's summary, of which swebench takes the last.
        (
            START + "FAILED t.py::new\nPASSED t.py::old\nPASSED t.py::new\n" + END + CODE.format(1),
            Reason.RESULTS_DISAGREE,
        ),
        (START + "FAILED t.py::new\nFAILED a::b\nXFAIL t.py::new\nPASSED t.py::old\n" + END, Reason.RESULTS_DISAGREE),
        (START + "ERROR t.py\nPASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(2), Reason.RESULTS_DISAGREE),
        (START + "FAILED t.py::new\n" + CODE.format(0) + END + CODE.format(1) * 2, Reason.LOG_FORGED),
        # A test that passes and cannot be taken down; a test of the file that nobody asked for.
        (START + "PASSED t.py::new\nPASSED t.py::old\nERROR t.py::old\n" + END + CODE.format(1), Reason.TESTS_FAILED),
        (START + "PASSED t.py::new\nPASSED t.py::old\nFAILED t.py::more\n" + END + CODE.format(1), None),
    ],
)
async def test_logs(log: str, reason: Reason | None) -> None:
    box = ScriptedBox(log)
    verdict = await graded(box)
    assert verdict.reason is reason and verdict.reward == (1.0 if reason is None else 0.0)
    assert box.closed == 1 and verdict.seconds > 0
    assert json.loads(json.dumps(verdict.to_dict()))["reason"] == reason


async def test_a_log_of_very_many_lines_is_cut_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.swebench._MOST_LINES", 1000)  # a million take half a minute
    results = "PASSED t.py::new\nPASSED t.py::old\n"
    assert (await graded(ScriptedBox(START + "\n" * 1500 + results + END))).reward == 1.0
    assert (await graded(ScriptedBox(START + results + "\n" * 1500 + END))).reward == 1.0
    lost = await graded(ScriptedBox(START + "\n" * 1500 + results + "\n" * 1500 + END))
    assert lost.outcome is Outcome.UNRESOLVED, "nothing is cut"


NEW = "test_new (a.tests.T)"


@pytest.mark.parametrize(
    ("parser", "new", "log", "reason"),
    [
        ("django", NEW, "{} ... ok\ntest_b (a.tests.T) ... FAIL\nFAIL: test_b (a.tests.T)\nSays.\n", None),
        ("django", NEW, "{} ... FAIL\ntest_b (a.tests.T) ... FAIL\n{} ... ok\n", Reason.RESULTS_DISAGREE),
        ("django", NEW, "{} ... FAIL\nok, this is printed\n", Reason.RESULTS_DISAGREE),
        ("django", NEW, "{} ... printed\nok\nFAIL\nFAIL: {}\n-----\n", Reason.RESULTS_DISAGREE),
        ("django", NEW, "{} ... printed\nok\nERROR: {} (i=1)\n-----\n", Reason.RESULTS_DISAGREE),
        ("django", "It works.", "t (a.T)\n{} ... printed\nok\nFAIL: t (a.T)\n{}\n", Reason.RESULTS_DISAGREE),
        ("django", NEW, "ERROR: setUpClass (a.tests.T)\n-----\n{} ... ok\n", Reason.RESULTS_DISAGREE),
        ("django", NEW, "ERROR: tearDownClass (a.tests.T)\n-----\n{} ... ok\n", None),
        ("django", NEW, "ERROR: setUpClass (a.tests.Other)\n-----\n{} ... ok\n", None),
        ("django", NEW, "ERROR: a.tests (unittest.loader._FailedTest)\n---\n{} ... ok\n", Reason.RESULTS_DISAGREE),
        ("sympy", "test_new", "test_b F\n{} ok\n___ sympy/a/tests/test_a.py:test_b ___\n", None),
        ("sympy", "test_new", "{} F\ntest_b F\n{} ok\n", Reason.RESULTS_DISAGREE),
        ("sympy", "test_new", "{} ok\n F\n___ sympy/a/tests/test_a.py:{} ___\n", Reason.RESULTS_DISAGREE),
        ("pytest_v2", "t.py::new[a b]", "FAILED {} - x\nFAILED t.py::b\nPASSED {}\n", Reason.RESULTS_DISAGREE),
        ("pytest_v2", "t.py::new", "PASSED {}\nERROR {} - at teardown\n", None),
        ("pytest_options", "t.py::new[/x]", "FAILED t.py::new[/a/x]\nPASSED {}\n", Reason.RESULTS_DISAGREE),
        ("pytest", "t.py::new[log(a", "FAILED {}, b)]\nFAILED t.py::b\nPASSED {}\n", Reason.RESULTS_DISAGREE),
        ("seaborn", "t.py::new", "FAILED {}\nFAILED t.py::b\nPASSED {}\n", Reason.RESULTS_DISAGREE),
        (
            "gotest",
            "TestNew",
            "--- FAIL: {} (0.0s)\n--- FAIL: TestB (0.0s)\n--- PASS: {} (0.0s)\n",
            Reason.RESULTS_DISAGREE,
        ),
        ("gotest", "TestNew", "--- FAIL: {} (0.0s)\nx\r--- PASS: {} (0.0s)\r\n", Reason.RESULTS_DISAGREE),
        ("pytest", "t.py::new", "FAILED {} - x\rPASSED {}\r", Reason.RESULTS_DISAGREE),
        ("cargo", "wire::new", "ERROR wire is cut\ntest b ... FAILED\ntest {} ... ok\n", None),
        ("cargo", "new", "test {} ... FAILED\ntest b ... FAILED\ntest {} ... ok\n", Reason.RESULTS_DISAGREE),
        (
            "googletest",
            "A.New",
            "[ FAILED ] {} (0 ms)\n[ FAILED ] A.B (0 ms)\n[ OK ] {} (0 ms)\n",
            Reason.RESULTS_DISAGREE,
        ),
        ("phpunit", "Calc > new", "Calc (A\\Calc)\n ✘ new\n ✘ more\n ✔ new\n", Reason.RESULTS_DISAGREE),
        ("phpunit", "Calc > new", "Other (A\\Other)\n ✘ new\nCalc (A\\Calc)\n ✔ new\n", None),
    ],
)
async def test_no_printed_line_takes_a_failure_back(parser: str, new: str, log: str, reason: Reason | None) -> None:
    """The logs end with status 1, and something in them failed, as swebench wants it."""
    row = task(log_parser=f"parse_log_{parser}", FAIL_TO_PASS=json.dumps([new]), PASS_TO_PASS="[]")
    box = ScriptedBox(START + log.replace("{}", new) + END + CODE.format(1))
    assert (await graded(box, of=row)).reason is reason


@pytest.mark.parametrize(
    ("new", "reason"), [("TestRouteStaticFile", None), ("TestRouteStaticNoListing", "tests_failed")]
)
async def test_a_real_log_of_gos_tests(new: str, reason: str | None) -> None:
    """gin's, in which one test fails and another is skipped (tests/logs/LICENSE says where it is from)."""
    log = (Path(__file__).parents[3] / "tests" / "logs" / "gotest.txt").read_text()
    old = ["TestContextInitQueryCache/queryCache_should_be_empty_when_Request_is_nil", "TestBasicAuth"]
    row = task(log_parser="parse_log_gotest", FAIL_TO_PASS=json.dumps([new]), PASS_TO_PASS=json.dumps(old))
    verdict = await graded(ScriptedBox(START + log + END + CODE.format(1)), of=row)
    assert verdict.reason == reason and verdict.tests["PASS_TO_PASS"] == {"success": old, "failure": []}


def test_the_parsers_that_are_read_from_swebenchs_source_are_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    assert _parsers_in_source() == set(PARSER_REGISTRY)
    monkeypatch.setitem(PARSER_REGISTRY, "mine", len)
    assert "mine" in log_parsers()  # whoever imports swebench may register parsers


async def test_the_script_merges_its_streams_first() -> None:
    box = ScriptedBox()
    await graded(box)
    assert box.script.startswith(b"#!/bin/bash\nexec 2>&1\nset -uxo pipefail\n")
    assert box.patch == PATCH


async def test_a_log_may_have_bytes_that_are_not_utf8() -> None:
    class Binary(ScriptedBox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            done = await super().exec(argv, **options)
            return replace(done, stdout=done.stdout.replace(b"PASSED", b"\xff\x00\nPASSED"))

    assert (await graded(Binary(START + "PASSED t.py::new\nPASSED t.py::old\n" + END))).reward == 1.0


@pytest.mark.parametrize("patch", [b"", b" \n"])
async def test_an_empty_patch_boots_nothing(patch: bytes) -> None:
    async def boot() -> ScriptedBox:
        raise AssertionError("booted")

    assert (await grade(task(), patch, boot, timeout_s=9)).reason is Reason.EMPTY_PATCH


async def test_without_a_patch_the_tests_run_on_the_snapshot() -> None:
    box = ScriptedBox(START + "FAILED t.py::new\nPASSED t.py::old\n" + END)

    async def boot() -> ScriptedBox:
        return box

    assert (await grade(task(), None, boot, timeout_s=9)).reason is Reason.TESTS_FAILED
    assert (box.runs, box.patch) == (1, b"")


async def test_policy_failures_around_the_tests() -> None:
    refused = await graded(ScriptedBox(apply=1))
    assert refused.reason is Reason.PATCH_APPLY_FAILED and refused.detail == "error: no"
    assert (await graded(ScriptedBox(START, timed_out=True))).reason is Reason.TEST_TIMEOUT


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxError("no_space", "disk"), Reason.NO_SPACE),
        (SandboxError("new_cause"), Reason.SANDBOX_FAILED),
        (RuntimeError("bug"), Reason.GRADER_CRASHED),
    ],
)
async def test_infrastructure_failures_are_no_reward(error: Exception, reason: Reason) -> None:
    async def boot() -> ScriptedBox:
        raise error

    box = ScriptedBox(error)
    for verdict in (await graded(box), await grade(task(), PATCH, boot, timeout_s=9)):
        assert (verdict.reason, verdict.outcome, verdict.reward) == (reason, Outcome.INFRA_FAILURE, None)
        assert verdict.is_infra and str(error) in verdict.detail
    assert box.closed == 1


async def test_a_box_without_git_is_an_infrastructure_failure() -> None:
    assert (await graded(ScriptedBox(apply=127))).reason is Reason.NO_GIT
    # Nothing of the policy has run when git is killed or does not end, and its patch is not large.
    for status, said in ((137, "was killed (signal 9)"), (-1, "was not done in time")):
        verdict = await graded(ScriptedBox(apply=status))
        assert verdict.reason is Reason.EXEC_FAILED and f"git apply {said}" in verdict.detail


async def test_a_patch_that_git_reads_differently_is_refused() -> None:
    both = PATCH + PATCH.replace(b"x", b"y")
    refused = await graded(ScriptedBox(START), both)  # the box says that git has changed only x
    assert refused.reason is Reason.PATCH_APPLY_FAILED and "other files" in refused.detail


@pytest.mark.parametrize("patch", [b"no patch\n", PATCH.replace(b"a/x b/x", b"a/../x b/../x")])
async def test_a_patch_that_cannot_be_read_boots_nothing(patch: bytes) -> None:
    async def boot() -> ScriptedBox:
        raise AssertionError("booted")

    assert (await grade(task(), patch, boot, timeout_s=9)).reason is Reason.PATCH_APPLY_FAILED


async def test_only_what_the_rules_leave_is_applied() -> None:
    rules = Rules(["y"], {"both": {"path": "^[xy]$"}, "not": {"added": "x"}})
    box = ScriptedBox(START + "PASSED t.py::new\nPASSED t.py::old\n" + END)
    verdict = await graded(box, PATCH.replace(b"x", b"y") + PATCH, rules=rules)
    assert (verdict.reward, verdict.dropped, verdict.flags) == (1.0, ("y",), ("both",))
    assert box.patch == PATCH
    assert verdict.to_dict()["dropped"] == ["y"] and verdict.to_dict()["flags"] == ["both"]
    box = ScriptedBox()
    verdict = await graded(box, PATCH.replace(b"x", b"y"), rules=rules)
    assert (verdict.reason, verdict.reward, verdict.dropped) == (Reason.FORBIDDEN_PATH_ONLY, 0.0, ("y",))
    assert verdict.flags == ("both",) and not box.runs and not box.closed


@pytest.mark.parametrize(("returncode", "reason"), [(137, Reason.LOG_UNPARSABLE), (128, None), (1, None)])
async def test_an_eval_script_that_was_killed_has_no_results(returncode: int, reason: Reason | None) -> None:
    class Ended(ScriptedBox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            return replace(await super().exec(argv, **options), returncode=returncode)

    log = START + "PASSED t.py::new\nPASSED t.py::old\n" + END + CODE.format(0)
    assert (await graded(Ended(log))).reason is reason


@pytest.mark.parametrize("where", ["boot", "exec", "close"])
async def test_a_grading_that_hangs_is_an_infrastructure_failure(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.grading._CLOSE_S", 0.01)

    class Hanging(ScriptedBox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            await hang("exec")
            return await super().exec(argv, **options)

        async def close(self) -> None:
            await super().close()
            await hang("close")

    async def hang(here: str) -> None:
        await asyncio.sleep(600 if here == where else 0)

    async def boot() -> Hanging:
        await hang("boot")
        return box

    box = Hanging(START + "PASSED t.py::new\nPASSED t.py::old\n" + END)
    verdict = await grade(task(), PATCH, boot, timeout_s=0.1, spare_s=1.0)
    if where == "close":  # the verdict was already known
        assert verdict.reward == 1.0
    else:
        assert (verdict.reason, verdict.reward) == (Reason.GRADER_HUNG, None)
    assert box.closed == (where != "boot")


async def test_cancellation_closes_the_box() -> None:
    class Hanging(ScriptedBox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            reached.set()
            await asyncio.sleep(60)
            return await super().exec(argv, **options)

    reached, box = asyncio.Event(), Hanging()
    running = asyncio.create_task(graded(box))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert box.closed == 1


def test_every_reason_is_either_the_policys_or_the_infrastructures() -> None:
    assert Verdict(None).reward == 1.0
    for reason in Reason:
        assert Verdict(reason).reward == (None if reason.is_infra or reason is Reason.NOT_GRADED else 0.0)
        known = Verdict.infra(reason.value, "x")
        assert known == Verdict(reason, "x") if reason.is_infra else known.reason is Reason.SANDBOX_FAILED


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("status", ["ok", "FAIL"])
async def test_a_line_that_its_parser_cannot_read_is_no_result(status: str, end: str) -> None:
    """swebench's parser of Django's logs raises for "FAIL:" alone, which any program, and logging, can print."""
    said = f"x{end}FAIL:{end}ERROR:root:boom{end}new (t.T) ... {status}\nold (t.T) ... ok\n"
    row = {"log_parser": "parse_log_django", "FAIL_TO_PASS": '["new (t.T)"]', "PASS_TO_PASS": '["old (t.T)"]'}
    verdict = await graded(ScriptedBox(f"{START}{said}{END}{CODE.format(int(status != 'ok'))}"), of=task(**row))
    assert verdict.reason is (None if status == "ok" else Reason.TESTS_FAILED), verdict


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("django", "a ... Testing against Django installed in x\n" * 100_000),
        ("sympy", " " * 2000 + ".py:" * 500 + "\n"),
    ],
)
async def test_a_log_that_takes_long_to_read_stops_nothing_else(
    parser: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """swebench's parser of Django's logs takes time by their square; at the limit of 16 MiB, that is a day. That of
    sympy's takes time by the cube of a line. A regular expression lets no other thread run."""
    monkeypatch.setattr("rewards.swebench._LONGEST_S", 3.0)
    graded_ = asyncio.ensure_future(
        graded(ScriptedBox(f"{START}{said}{END}{CODE.format(0)}"), of=task(log_parser=f"parse_log_{parser}"))
    )
    ticks = 0
    while not graded_.done():
        await asyncio.sleep(0.05)
        ticks += 1
    verdict = await graded_
    assert (verdict.reason, verdict.detail) == (Reason.LOG_UNPARSABLE, "reading the log: it took longer than 3 s")
    assert ticks > 10  # of some sixty; the machine may be busy


async def test_a_long_log_is_judged_as_a_short_one() -> None:
    said = "".join(f"PASSED t.py::{name}\n" for name in ("new", "old", *(f"more{n}" for n in range(2000))))
    verdict = await graded(ScriptedBox(f"{START}{said}{END}{CODE.format(0)}"))
    assert verdict.reason is None and verdict.tests["FAIL_TO_PASS"]["success"] == ["t.py::new"]


def test_work_apart_may_be_ended_by_the_kernel() -> None:
    """Nothing else that ends it is the doing of what it reads."""
    with pytest.raises(TimeoutError, match="its process was ended"):
        apart(60.0, (), signal.raise_signal, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with status 9"):
        apart(60.0, (), os._exit, 9)
    with pytest.raises(ZeroDivisionError):
        apart(60.0, (), divmod, 7, 0)
    assert apart(60.0, (), divmod, 7, 2) == (3, 1)
    with pytest.raises(RuntimeError, match="ended with status 1"):
        apart(60.0, ("no_such_module",), divmod, 7, 2)


def test_the_time_of_work_apart_begins_with_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes long to import what the work needs, and that is not the doing of what is read."""
    (tmp_path / "slowly.py").write_text("import time\ntime.sleep(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apart(2.0, ("slowly",), divmod, 7, 2) == (3, 1)


def test_work_apart_ends_also_if_nobody_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import os, time\n\n\ndef work():\n    open('pid.new', 'w').write(str(os.getpid()))\n"
        "    os.rename('pid.new', 'pid')\n    time.sleep(600)\n"
    )
    waits = "from rewards.apart import apart\nfrom work import work\napart(1.0, (), work)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", waits], cwd=tmp_path, env=environment) as one:
        while not (tmp_path / "pid").exists():
            time.sleep(0.05)
        one.kill()
    pid = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(pid):
        time.sleep(0.05)
