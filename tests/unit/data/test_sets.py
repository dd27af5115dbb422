"""This module tests conversion of each public set's rows: where fields come from, what is refused, and whether the
scripts really work.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewards.grade import grade
from rewards.patch import patched_by
from rewards.task import Task
from rewards.verdict import Outcome, Reason
from rl.data.convert import convert
from rl.data.fields import Why
from rl.data.patches import changes, from_commit, reverse
from rl.data.sets import _REBENCH_V2_PARSERS, SETS, ConversionOptions
from rollout.sandbox.local.box import boot_local
from tests import datasets
from tests.sandboxes import BWRAP

MAKE: dict[str, Callable[..., dict[str, Any]]] = {
    "swe-bench": datasets.swe_bench,
    "swe-bench-lite": datasets.swe_bench,
    "swe-bench-verified": datasets.swe_bench,
    "swe-bench-multilingual": datasets.multilingual,
    "swe-bench-pro": datasets.swe_bench_pro,
    "swe-bench-live": datasets.swe_bench_live,
    "swe-gym": datasets.swe_gym,
    "swe-rebench": datasets.swe_rebench,
    "swe-rebench-v2": datasets.swe_rebench_v2,
    "swe-smith": datasets.swe_smith,
    "r2e-gym": datasets.r2e_gym,
}


CHECKOUT: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _pro_scripts(tmp_path_factory: pytest.TempPathFactory) -> None:
    CHECKOUT["scripts"] = datasets.write_pro_scripts(tmp_path_factory.mktemp("pro"))


def mapped(name: str, **changes_: Any) -> dict[str, Any]:
    options = ConversionOptions(recipes={}, **CHECKOUT, **changes_.pop("options", {}))
    rows, refused = convert([MAKE[name](**changes_)], name, options)
    assert not refused, refused
    return rows[0]


def refused_as(name: str, options: ConversionOptions | None = None, **changes_: Any) -> tuple[Why, str]:
    rows, refused = convert([MAKE[name](**changes_)], name, options or ConversionOptions(recipes={}, **CHECKOUT))
    assert not rows and len(refused) == 1 and "\n" not in refused[0].detail
    return refused[0].why, refused[0].detail


def test_every_set_of_rows_has_a_row_here() -> None:
    assert {*MAKE, "harbor"} == {*SETS}  # test_harbor.py has Harbor's, which are directories


@pytest.mark.parametrize("name", MAKE)
def test_a_row_of_every_set_becomes_a_task(name: str) -> None:
    row = mapped(name)
    task = Task.from_row(row, Path())
    assert task.patch and changes(task.patch) and task.eval_script.startswith("#!/bin/bash\nset -uxo pipefail\n")
    assert task.eval_script.index(">>>>> Start") < task.eval_script.index(">>>>> End")
    assert row["set"] == name and len(task.FAIL_TO_PASS) == (1 if name == "r2e-gym" else 2)
    assert "off by one" in task.problem_statement


def test_a_v5_row_is_taken_as_it_is() -> None:
    row, source = mapped("swe-bench-verified"), datasets.swe_bench()
    same = ("image", "eval_script", "log_parser", "eval_type", "base_commit", "version", "patch", "difficulty")
    assert {name: row[name] for name in same} == {name: source[name] for name in same}
    assert row["FAIL_TO_PASS"] == datasets.FAILING


def test_fields_that_a_v5_row_may_leave_out_follow_swebenchs_rules() -> None:
    row = mapped("swe-bench", image=None, eval_type="", instance_id="Acme__Calc-7")
    assert row["image"] == "swebench/sweb.eval.x86_64.acme_1776_calc-7:latest"
    assert row["eval_type"] == "pass_and_fail"
    row = mapped("swe-bench", eval_type=None, repo="eslint/eslint", log_parser="parse_log_eslint")
    assert row["eval_type"] == "fail_only"


def test_a_row_from_before_v5_takes_its_recipe_from_the_v5_row() -> None:
    old = datasets.swe_bench_4(problem_statement="Said otherwise.", FAIL_TO_PASS='["misspelt"]')
    rows, refused = convert([old], "swe-bench", ConversionOptions(recipes={"acme__calc-7": datasets.swe_bench()}))
    assert not refused
    assert rows[0]["problem_statement"] == "Said otherwise." and rows[0]["FAIL_TO_PASS"] == datasets.FAILING
    assert rows[0]["eval_script"] == datasets.swe_bench()["eval_script"]
    rows, refused = convert([old], "swe-bench", ConversionOptions(recipes={}))
    assert not rows and refused[0].why is Why.NO_RECIPE and "--recipes" in refused[0].detail


def test_swe_gym_uses_its_repositories_test_commands() -> None:
    row = mapped("swe-gym", repo="Project-MONAI/MONAI", instance_id="Project-MONAI__MONAI-1010")
    assert row["image"] == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1010:latest"
    assert "\npytest -rA tests/test_calc.py tests/test_more.py\n" in row["eval_script"]
    script = mapped("swe-gym", repo="conan-io/conan")["eval_script"]
    assert "\nexport PYTHONPATH=${PYTHONPATH:-}:$(pwd)\n" in script and "\npytest -n0 -rA tests/" in script
    cases = datasets.TEST_PATCH.replace("+no test", "+[case testOne-skip]").replace("calc.py b", "calc.py b")
    script = mapped("swe-gym", repo="python/mypy", test_patch=cases)["eval_script"]
    assert "\npytest -n0 -rA -k testOne-skip\n" in script


def test_swe_rebench_uses_the_rows_test_command() -> None:
    row = mapped("swe-rebench")
    command = datasets.swe_rebench()["install_config"]["test_cmd"]
    assert f"\n{command} tests/test_calc.py tests/test_more.py\n" in row["eval_script"]
    assert row["image"] == "swerebench/sweb.eval.x86_64.acme_1776_calc-8" and row["difficulty"] == "1"
    assert "pip install" not in row["eval_script"]  # in place: the image's installation sees the patch
    config = datasets.swe_rebench()["install_config"] | {"install": "pip install .", "test_cmd": ["make", "pytest"]}
    script = mapped("swe-rebench", install_config=json.dumps(config), meta=None)["eval_script"]
    assert "PIP_NO_INDEX=1" in script and script.index("pip install .\n") < script.index(">>>>> Start")
    assert "\nmake\npytest tests/test_calc.py tests/test_more.py\n" in script


def test_swe_rebench_v2_runs_in_its_images_directory() -> None:
    row = mapped("swe-rebench-v2")
    assert (row["workdir"], row["image"]) == ("/calc", "docker.io/swerebenchv2/acme-calc:9-3f3f3f3")
    assert row["difficulty"] == "easy" and "conda" not in row["eval_script"] and "/testbed" not in row["eval_script"]
    assert "\n(\nset +u +o pipefail -e\npytest -rA --color=no tests\n)\n: '>>>>> End" in row["eval_script"]
    go = datasets.swe_rebench_v2()["install_config"] | {
        "log_parser": "parse_log_gotest",
        "test_cmd": "go test -v ./...",
    }
    row = mapped("swe-rebench-v2", install_config=json.dumps(go), meta={"llm_metadata": {"difficulty": "hard"}})
    assert (row["log_parser"], row["difficulty"]) == ("parse_log_gotest", "hard")


@pytest.mark.parametrize(("name", "field"), [("swe-rebench-v2", "test_cmd"), ("swe-bench-live", "test_cmds")])
def test_commands_run_as_the_sets_harness_runs_them(name: str, field: str, tmp_path: Path) -> None:
    """SWE-rebench-V2's end with the first that fails, SWE-bench-Live's go on; and nobody's variables must be set."""
    given = ["echo first $UNSET", "false | true", "false", "echo last"]
    config = {"install_config": datasets.swe_rebench_v2()["install_config"] | {field: given}}
    script = mapped(name, **(config if name == "swe-rebench-v2" else {field: given}))["eval_script"]
    script = script.replace(f"cd {ELSEWHERE[name]}\n", f"cd {tmp_path}\n").replace("~", str(tmp_path))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == (["first"] if name == "swe-rebench-v2" else ["first", "last"]), done
    assert ">>>>> End Test Output" in done.stderr


def test_every_parser_that_swe_rebench_v2_shares_is_swebenchs() -> None:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    names = _REBENCH_V2_PARSERS.pattern.removeprefix("parse_log_(").removesuffix(")").split("|")
    assert {f"parse_log_{name}" for name in names} <= {*PARSER_REGISTRY} and len(names) == 19


def test_swe_bench_live_names_its_image_by_the_instance() -> None:
    row = mapped("swe-bench-live", test_cmds=["make install", "pytest -rA"])
    assert row["image"] == "starryzhang/sweb.eval.x86_64.acme_1776_calc-7" and row["difficulty"] is None
    assert "\nset +u +o pipefail +e\nmake install\npytest -rA\n)\n" in row["eval_script"]


def test_swe_bench_pro_runs_the_instances_own_script_and_parser() -> None:
    row = mapped("swe-bench-pro")
    assert row["image"] == f"jefzda/sweap-images:acme.calc-acme__calc-{datasets.LATER}" and row["workdir"] == "/app"
    assert row["PASS_TO_PASS"][-1] == "tests/test_calc.py::test_it's  [a]"
    assert row["problem_statement"].endswith(
        "\n\nRequirements:\n- total() returns the sum.\n\nNew interfaces introduced:\nNo new interfaces are introduced."
    )
    script = row["eval_script"]
    assert all(text in script for text in datasets.PRO_SCRIPTS.values()) and datasets.LATER not in script
    assert 'bash "$own/run_script.sh" tests/test_more.py,tests/test_calc.py >' in script
    assert patched_by(script) == {"tests/test_calc.py", "tests/test_more.py", "tests/notes.txt"}


def test_swe_smiths_patch_is_reversed() -> None:
    row = mapped("swe-smith")
    assert row["patch"] == datasets.GOLD and row["setup_patch"] == datasets.BUG
    assert row["hidden_paths"] == ["tests/test_calc.py", "tests/test_more.py"]
    assert (row["repo"], row["version"]) == ("acme/calc.py", "1fd52536")
    assert row["image"] == "jyangballin/swesmith.x86_64.acme_1776_calc.py.1fd52536"
    assert "--verbose -rap tests/sub/test_far.py tests/test_calc.py tests/test_more.py\n" in row["eval_script"]
    near = mapped("swe-smith", options={"regression": "same-files"}, image_name="swesmith.x86_64.acme__calc.1fd52536")
    assert near["PASS_TO_PASS"] == datasets.PASSING and "test_far" not in near["eval_script"]
    assert near["image"] == row["image"]
    unit = mapped("swe-smith", instance_id="tornadoweb__tornado.d5ac65c1.pr_1", FAIL_TO_PASS=["test_a (m.T)"])
    assert unit["log_parser"] == "parse_log_django" and unit["hidden_paths"] == []


def test_r2e_gym_reads_the_commit_and_the_results() -> None:
    row = mapped("r2e-gym")
    assert row["patch"] == datasets.GOLD and row["base_commit"] == "0d" * 20  # Python files that are no tests
    assert row["instance_id"] == f"aiohttp__aiohttp-{datasets.COMMIT}"
    assert row["problem_statement"] == "**Title:** total() is off by one"
    assert row["FAIL_TO_PASS"] == ["test_total"]
    assert row["PASS_TO_PASS"] == ["TestCalc.test_blank[a b", "TestCalc.test_type"]
    assert {"/r2e_tests", "run_tests.sh"} <= {*row["hidden_paths"]}


def test_swebench_reads_r2e_gyms_rewritten_log(tmp_path: Path) -> None:
    """The script runs with a runner that prints R2E-Gym's log and with directories of the test for /testbed and
    /r2e_tests."""
    from swebench.harness.log_parsers import PARSER_REGISTRY

    row = mapped("r2e-gym")
    (tmp_path / "testbed").mkdir()
    (tmp_path / "r2e_tests").mkdir()
    (tmp_path / "log").write_text(datasets.R2E_LOG)
    (tmp_path / "testbed/run_tests.sh").write_text(f"test -d r2e_tests && cat {tmp_path}/log; exit 3")
    script = (
        row["eval_script"].replace("/testbed", f"{tmp_path}/testbed").replace("/r2e_tests", f"{tmp_path}/r2e_tests")
    )
    script = script.replace(": '>>>>> End", "echo status $?\n: '>>>>> End")
    done = subprocess.run(["bash", "-c", f"exec 2>&1\n{script}"], capture_output=True, text=True)
    found = PARSER_REGISTRY[row["log_parser"]](done.stdout.split(">>>>> Start Test Output")[1], None)
    assert {name for name, result in found.items() if result == "PASSED"} >= {
        *row["FAIL_TO_PASS"],
        *row["PASS_TO_PASS"],
    }
    assert found["test_broken"] == "FAILED" and "status 3" in done.stdout


@pytest.mark.parametrize(
    ("name", "changes_", "why"),
    [
        ("swe-bench", {"instance_id": None}, Why.NO_ID),
        ("swe-bench", {"problem_statement": " "}, Why.NO_STATEMENT),
        ("swe-bench", {"patch": None}, Why.NO_GOLD_PATCH),
        ("swe-bench", {"patch": "no patch"}, Why.BAD_PATCH),
        ("swe-bench", {"FAIL_TO_PASS": "[]"}, Why.NO_FAILING_TEST),
        ("swe-bench", {"FAIL_TO_PASS": "['single quotes']"}, Why.BAD_TESTS),
        ("swe-bench", {"PASS_TO_PASS": [1]}, Why.BAD_TESTS),
        ("swe-bench", {"eval_script": None}, Why.NO_RECIPE),
        ("swe-bench", {"eval_script": "#!/bin/bash\npytest\n"}, Why.NO_RECIPE),
        ("swe-bench", {"log_parser": ""}, Why.NO_PARSER),
        ("swe-bench", {"log_parser": "parse_log_nothing"}, Why.NO_PARSER),
        ("swe-bench", {"eval_type": "guess"}, Why.INVALID),
        ("swe-bench", {"image_assets": '{"test_patch": [{"path": "a.png"}]}'}, Why.UNSUPPORTED),
        ("swe-gym", {"repo": "acme/calc"}, Why.NO_RECIPE),
        ("swe-gym", {"test_patch": None}, Why.BAD_PATCH),
        ("swe-gym", {"repo": "python/mypy"}, Why.NO_RECIPE),
        ("swe-gym", {"test_patch": datasets.TEST_PATCH[-120:]}, Why.BAD_PATCH),
        (
            "swe-gym",
            {"test_patch": "diff --git a/a.png b/a.png\nBinary files a/a.png and b/a.png differ\n"},
            Why.BAD_PATCH,
        ),
        ("swe-rebench", {"docker_image": None}, Why.NO_IMAGE),
        ("swe-rebench", {"docker_image": None, "language": "python"}, Why.UNSUPPORTED),
        ("swe-rebench", {"install_config": None}, Why.NO_RECIPE),
        ("swe-rebench", {"install_config": "{"}, Why.NO_RECIPE),
        ("swe-rebench", {"install_config": {"log_parser": "parse_log_pytest"}}, Why.NO_RECIPE),
        ("swe-rebench", {"install_config": {"test_cmd": "pytest", "log_parser": "parse_log_own"}}, Why.NO_PARSER),
        ("swe-rebench-v2", {"image_name": None}, Why.NO_IMAGE),
        ("swe-rebench-v2", {"install_config": {"log_parser": "parse_log_cargo"}}, Why.NO_RECIPE),
        ("swe-rebench-v2", {"install_config": {"test_cmd": ["x"], "log_parser": "parse_log_js_4"}}, Why.NO_PARSER),
        ("swe-rebench-v2", {"install_config": {"test_cmd": ["x"], "log_parser": "parse_log_maven"}}, Why.NO_PARSER),
        ("swe-rebench-v2", {"repo": "acme/.."}, Why.INVALID),
        ("swe-rebench-v2", {"test_patch": ""}, Why.BAD_PATCH),
        ("swe-bench-live", {"log_parser": "def parser(log):\n    return {}"}, Why.NO_PARSER),
        ("swe-bench-live", {"test_cmds": []}, Why.NO_RECIPE),
        ("swe-bench-live", {"docker_image": 5}, Why.INVALID),
        ("swe-bench-pro", {"instance_id": "instance_acme__calc-unknown"}, Why.NO_RECIPE),
        ("swe-bench-pro", {"instance_id": "../pro"}, Why.NO_RECIPE),
        ("swe-bench-pro", {"before_repo_set_cmd": None}, Why.NO_RECIPE),
        ("swe-bench-pro", {"before_repo_set_cmd": "git checkout abc1234 -- x\nmake"}, Why.UNSUPPORTED),
        ("swe-bench-pro", {"before_repo_set_cmd": "git checkout abc1234 -- calc.py"}, Why.UNSUPPORTED),
        ("swe-bench-pro", {"fail_to_pass": "[]"}, Why.NO_FAILING_TEST),
        ("swe-bench-pro", {"fail_to_pass": "['a'"}, Why.BAD_TESTS),
        ("swe-bench-pro", {"pass_to_pass": "[open('/etc/passwd')]"}, Why.BAD_TESTS),
        ("swe-bench-pro", {"pass_to_pass": "[" * 5000}, Why.BAD_TESTS),
        ("swe-bench-pro", {"selected_test_files_to_run": "tests"}, Why.BAD_TESTS),
        ("swe-bench-pro", {"fail_to_pass": "{[]: 1}"}, Why.BAD_TESTS),
        ("swe-bench-pro", {"dockerhub_tag": ""}, Why.NO_IMAGE),
        ("swe-smith", {"instance_id": "acme__calc-7"}, Why.NO_IMAGE),
        ("swe-smith", {"FAIL_TO_PASS": ["TestContext/Sub"]}, Why.NO_RECIPE),
        ("swe-smith", {"problem_statement": ""}, Why.NO_STATEMENT),
        ("swe-smith", {"patch": "GIT binary patch\n"}, Why.BAD_PATCH),
        ("swe-smith", {"patch": datasets.BUG[:-25]}, Why.BAD_PATCH),
        ("r2e-gym", {"expected_output_json": None}, Why.NO_FAILING_TEST),
        ("r2e-gym", {"expected_output_json": "{"}, Why.BAD_TESTS),
        ("r2e-gym", {"execution_result_content": '{"old_commit_res_stdout": %s}'}, Why.BAD_TESTS),
        ("r2e-gym", {"parsed_commit_content": None}, Why.NO_GOLD_PATCH),
        ("r2e-gym", {"parsed_commit_content": "{}"}, Why.BAD_PATCH),
        (
            "r2e-gym",
            {"parsed_commit_content": json.dumps(datasets.parsed_commit(datasets.TEST_PATCH))},
            Why.NO_GOLD_PATCH,
        ),
        ("r2e-gym", {"docker_image": ""}, Why.NO_IMAGE),
    ],
)
def test_a_row_is_refused_with_a_reason(name: str, changes_: dict[str, Any], why: Why) -> None:
    assert refused_as(name, **changes_)[0] is why


def test_swe_bench_pro_needs_a_checkout_of_its_repository() -> None:
    why, detail = refused_as("swe-bench-pro", ConversionOptions(recipes={}))
    assert why is Why.NO_RECIPE and "--scripts" in detail


def test_an_r2e_row_in_which_nothing_failed_before_is_refused() -> None:
    kept = json.dumps({"old_commit_res_stdout": datasets.R2E_LOG})
    assert refused_as("r2e-gym", execution_result_content=kept)[0] is Why.NO_FAILING_TEST


def test_a_second_row_of_an_instance_is_refused() -> None:
    rows, refused = convert([datasets.swe_bench(), datasets.swe_bench()], "swe-bench", ConversionOptions(recipes={}))
    assert len(rows) == 1 and [(r.number, r.instance_id, r.why) for r in refused] == [(1, "acme__calc-7", Why.TWICE)]


def repository(directory: Path, **files: str) -> Path:
    """Make a work tree with one commit, as an image contains it."""
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["init", "-q", "--template="], ["add", "-A"], ["commit", "-qm", "image"]):
        subprocess.run([*git, *arguments], cwd=directory, check=True)
    return directory


ELSEWHERE = {"swe-rebench-v2": "/calc", "swe-bench-live": "/testbed", "swe-bench-pro": "/app"}


@pytest.mark.parametrize("isolation", [BWRAP])
@pytest.mark.parametrize("name", ["swe-bench", "swe-gym", "swe-rebench", "swe-smith", *ELSEWHERE])
async def test_the_gold_patch_resolves_a_converted_row_and_no_patch_does_not(
    name: str, isolation: Any, tmp_path: Path
) -> None:
    """The row is graded in a box with the repository at /testbed and the real pytest."""
    config = datasets.swe_rebench()["install_config"] | {"test_cmd": "pytest -rA --color=no"}
    row = mapped(name, **{"swe-rebench": {"install_config": config}}.get(name, {}))
    files = {"calc_py": datasets.BEFORE, "tests__test_calc_py": datasets.OLD_TEST, "conftest_py": ""}
    snapshot = repository(tmp_path / "image", **files)
    if name == "swe-smith":  # the image contains the tests, and the box has the bug applied
        subprocess.run(["git", "apply", "-"], input=datasets.TEST_PATCH.encode(), cwd=snapshot, check=True)
        shutil.copytree(snapshot / "tests", snapshot / "tests/sub")
        (snapshot / "tests/sub/test_calc.py").rename(snapshot / "tests/sub/test_far.py")
        (snapshot / "tests/sub/test_far.py").write_text("def test_far():\n    pass\n")
        (snapshot / "tests/sub/test_more.py").unlink()
        subprocess.run(["git", "add", "-A"], cwd=snapshot, check=True)
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@e", "commit", "-qm", "t"], cwd=snapshot, check=True
        )
    script = row["eval_script"].replace(f"cd {ELSEWHERE.get(name)}\n", "cd /testbed\n").replace("~", "$TMPDIR")
    script = script.replace("\npython -I", f"\n{sys.executable} -I")
    row["eval_script"] = script.replace("\npytest ", f"\nPYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest ")
    prepared = {"image": f"dir:{snapshot}", "setup_patch": None, "hidden_paths": []}  # the snapshot is the task's tree
    prepared["workdir"] = None
    task = Task.from_row(row | prepared, tmp_path)
    boot = functools.partial(boot_local, task.snapshot, isolation=isolation)
    verdict = await grade(task, task.patch.encode(), boot, timeout_s=60)
    assert verdict.outcome is Outcome.RESOLVED, verdict.log_tail
    verdict = await grade(task, None, boot, timeout_s=60)
    assert verdict.reason is Reason.TESTS_FAILED, verdict.log_tail
    # A file of the agent with a hidden test's name does not get in the way of the real one.
    forged = "diff --git a/tests/test_more.py b/tests/test_more.py\nnew file mode 100644\n--- /dev/null\n"
    forged += "+++ b/tests/test_more.py\n@@ -0,0 +1,2 @@\n+def test_empty():\n+    pass\n"
    if name in ("swe-gym", "swe-rebench", *ELSEWHERE):
        verdict = await grade(task, task.patch.encode() + forged.encode(), boot, timeout_s=60)
        assert verdict.outcome is Outcome.RESOLVED, verdict.log_tail
        verdict = await grade(task, forged.encode(), boot, timeout_s=60)
        assert verdict.reason is Reason.FORBIDDEN_PATH_ONLY, verdict.log_tail


def test_a_parsed_commit_becomes_the_patch_that_git_writes() -> None:
    unended = datasets.GOLD.replace("+    return result\n", "+    return result\n\\ No newline at end of file\n")
    for gold in (datasets.GOLD, unended):
        for others in ([datasets.TEST_PATCH], []):
            assert from_commit(datasets.parsed_commit(gold, *others)) == (gold, "0d" * 20)
    assert reverse(datasets.BUG) == datasets.GOLD
