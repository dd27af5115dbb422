"""This module has rows of one small, invented repository in the formats of the public sets: columns, types and quirks
are those of the sets (docs/data.md).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BEFORE = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result - 1\n"
)
GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -2,4 +2,4 @@ def total(values):
     result = 0
     for value in values:
         result += value
-    return result - 1
+    return result
"""
BUG = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -2,4 +2,4 @@ def total(values):
     result = 0
     for value in values:
         result += value
-    return result
+    return result - 1
"""
OLD_TEST = "def test_type():\n    from calc import total\n    assert isinstance(total([]), int)\n"
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,3 +1,9 @@
 def test_type():
     from calc import total
     assert isinstance(total([]), int)
+
+
+def test_total():
+    from calc import total
+
+    assert total([1, 2]) == 3
diff --git a/tests/test_more.py b/tests/test_more.py
new file mode 100644
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,4 @@
+def test_empty():
+    from calc import total
+
+    assert total([]) == 0
diff --git a/tests/notes.txt b/tests/notes.txt
new file mode 100644
--- /dev/null
+++ b/tests/notes.txt
@@ -0,0 +1 @@
+no test
"""
FAILING = ["tests/test_calc.py::test_total", "tests/test_more.py::test_empty"]
PASSING = ["tests/test_calc.py::test_type"]
COMMIT = "3f" * 20


def swe_bench(**changes: Any) -> dict[str, Any]:
    """Return a row of SWE-bench Verified since version 5."""
    script = (
        "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
        f"git checkout {COMMIT} tests/test_calc.py\ngit apply -v - <<'EOF_114329324912'\n{TEST_PATCH}EOF_114329324912\n"
        ": '>>>>> Start Test Output'\npytest -rA tests/test_calc.py tests/test_more.py\n: '>>>>> End Test Output'\n"
        f"git checkout {COMMIT} tests/test_calc.py\n"
    )
    return {
        **swe_bench_4(),
        "image": "swebench/sweb.eval.x86_64.acme_1776_calc-7:latest",
        "eval_script": script,
        "eval_type": "pass_and_fail",
        "log_parser": "parse_log_pytest",
        "image_assets": "",
    } | changes


def multilingual(**changes: Any) -> dict[str, Any]:
    """Return a row of SWE-bench Multilingual since version 5: the tests are Go's."""
    patch = (
        "diff --git a/total_test.go b/total_test.go\nnew file mode 100644\n--- /dev/null\n+++ b/total_test.go\n"
        "@@ -0,0 +1,1 @@\n+package calc\n"
    )
    script = (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit config --global --add safe.directory /testbed\n"
        f"git apply -v - <<'EOF_114329324912'\n{patch}EOF_114329324912\n"
        ": '>>>>> Start Test Output'\ngo test -v . -run '^TestTotal'\n: '>>>>> End Test Output'\n"
    )
    return (
        swe_bench(
            test_patch=patch,
            eval_script=script,
            log_parser="parse_log_gotest",
            FAIL_TO_PASS=json.dumps(["TestTotal", "TestTotal/empty"]),
            PASS_TO_PASS="[]",
            difficulty=None,
        )
        | changes
    )


def swe_bench_4(**changes: Any) -> dict[str, Any]:
    """Return the same row from before version 5: no script, no image, test lists as JSON texts."""
    return {
        "repo": "acme/calc",
        "instance_id": "acme__calc-7",
        "base_commit": COMMIT,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "total() is off by one\n\nIt should be the sum.",
        "hints_text": "",
        "created_at": "2021-01-01T00:00:00Z",
        "version": "1.2",
        "FAIL_TO_PASS": json.dumps(FAILING),
        "PASS_TO_PASS": json.dumps(PASSING),
        "environment_setup_commit": COMMIT,
        "difficulty": "<15 min fix",
    } | changes


def swe_gym(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "iterative__dvc-7",
        "hints_text": "",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "created_at": "2021-01-01T00:00:00Z",
        "problem_statement": "total() is off by one",
        "repo": "iterative/dvc",
        "base_commit": COMMIT,
        "version": "1.2",
        "PASS_TO_PASS": PASSING,
        "FAIL_TO_PASS": FAILING,
    } | changes


def swe_rebench(**changes: Any) -> dict[str, Any]:
    config = {
        "env_vars": None,
        "env_yml_path": None,
        "install": "pip install -e .[dev]",
        "log_parser": "parse_log_pytest",
        "no_use_env": None,
        "packages": "requirements.txt",
        "pip_packages": ["pytest"],
        "pre_install": None,
        "python": "3.9",
        "reqs_path": ["requirements/base.txt"],
        "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider",
    }
    score = {"difficulty_score": 1, "issue_text_score": 0, "test_score": 2}
    return {
        "instance_id": "acme__calc-8",
        "base_commit": COMMIT,
        "created_at": "2021-01-01 00:00:00",
        "environment_setup_commit": COMMIT,
        "hints_text": "",
        "patch": GOLD,
        "problem_statement": "total() is off by one",
        "repo": "acme/calc",
        "test_patch": TEST_PATCH,
        "meta": {"commit_name": "head_commit", "is_lite": True, "llm_score": score, "num_modified_files": 1},
        "version": "1.2",
        "install_config": config,
        "requirements": "pytest==7",
        "environment": None,
        "FAIL_TO_PASS": FAILING,
        "FAIL_TO_FAIL": [],
        "PASS_TO_PASS": PASSING,
        "PASS_TO_FAIL": [],
        "license_name": "MIT",
        "docker_image": "swerebench/sweb.eval.x86_64.acme_1776_calc-8",
        "image_name": None,
    } | changes


def swe_rebench_v2(**changes: Any) -> dict[str, Any]:
    """Return a row with the columns of the set's own sample.json."""
    config = {
        "base_image_name": "python_3.11:latest",
        "docker_specs": None,
        "install": ["pip install -e .", "pip install pytest"],
        "log_parser": "parse_log_pytest",
        "log_parsers": None,
        "test_cmd": ["pytest -rA --color=no tests"],
    }
    said = {"code": "A", "confidence": 0.97, "difficulty": "easy", "intent_completeness": "complete"}
    return {
        "base_commit": COMMIT,
        "created_at": 1609298073000,
        "instance_id": "acme__calc-9",
        "meta": {"llm_metadata": [said], "num_modified_files": 1, "pr_author": "a", "pr_labels": [], "pr_url": None},
        "patch": GOLD,
        "pr_description": "Fix the sum",
        "problem_statement": "total() is off by one",
        "repo": "Acme/calc",
        "test_patch": TEST_PATCH,
        "language": "python",
        "interface": "Function: total(values) Location: calc.py",
        "PASS_TO_PASS": PASSING,
        "FAIL_TO_PASS": FAILING,
        "install_config": config,
        "image_name": "docker.io/swerebenchv2/acme-calc:9-3f3f3f3",
    } | changes


def swe_bench_live(**changes: Any) -> dict[str, Any]:
    return {
        "repo": "acme/calc",
        "pull_number": "7",
        "instance_id": "Acme__calc-7",
        "issue_numbers": ["5"],
        "base_commit": COMMIT,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "total() is off by one",
        "hints_text": "",
        "all_hints_text": "",
        "commit_urls": ["https://example.com/commit/1"],
        "created_at": "2025-01-01T00:00:00Z",
        "commit_url": "https://example.com/tree/1",
        "test_cmds": ["pytest -rA --color=no tests"],
        "log_parser": "pytest",
        "difficulty": {"files": 1, "hunks": 1, "lines": 2},
        "FAIL_TO_PASS": FAILING,
        "PASS_TO_PASS": PASSING,
    } | changes


LATER = "5e" * 20


def swe_bench_pro(**changes: Any) -> dict[str, Any]:
    """Return a row whose lists are Python's texts, and whose tests come from a later commit."""
    return {
        "repo": "acme/calc",
        "instance_id": f"instance_acme__calc-{LATER}-vnan",
        "base_commit": COMMIT,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": '"# total() is off by one\\n\\nIt should be the sum."',
        "requirements": "- total() returns the sum.",
        "interface": "No new interfaces are introduced.",
        "repo_language": "python",
        "fail_to_pass": str(FAILING),
        "pass_to_pass": str([*PASSING, "tests/test_calc.py::test_it's  [a] "]),
        "issue_specificity": '["core_bug"]',
        "issue_categories": '["back_end_knowledge"]',
        "before_repo_set_cmd": f"git reset --hard {COMMIT}\ngit clean -fd \ngit checkout {COMMIT} \n"
        f"git checkout {LATER} -- tests/test_calc.py tests/test_more.py",
        "selected_test_files_to_run": '["tests/test_more.py", "tests/test_calc.py"]',
        "dockerhub_tag": f"acme.calc-acme__calc-{LATER}",
    } | changes


# As in the set's repository: a script that takes its tests with commas between them, and a parser that is given what
# the script has printed, on standard output and as errors.
PRO_SCRIPTS = {
    "run_script.sh": """\
#!/bin/bash
set -e
IFS=',' read -r -a TEST_FILES <<< "$1"
pytest -v --color=no "${TEST_FILES[@]}"
""",
    "parser.py": """\
import json, re, sys
from pathlib import Path

if len(sys.argv) != 4:
    sys.exit(1)
lines = Path(sys.argv[1]).read_text().splitlines() + Path(sys.argv[2]).read_text().splitlines()
found = [re.match(r"(\\S+::\\S+) (PASSED|FAILED|SKIPPED|ERROR)", line) for line in lines]
tests = [{"name": one[1], "status": one[2]} for one in found if one]
tests += [{"name": "tests/test_calc.py::test_it's  [a] ", "status": status} for status in ("FAILED", "PASSED")]
Path(sys.argv[3]).write_text(json.dumps({"tests": tests}))
""",
}


def write_pro_scripts(checkout: Path) -> Path:
    """Write these scripts where a checkout of the set's repository has them, and return it."""
    place = checkout / "run_scripts" / swe_bench_pro()["instance_id"]
    place.mkdir(parents=True)
    for name, text in PRO_SCRIPTS.items():
        (place / name).write_text(text)
    return checkout


def swe_smith(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "acme__calc.py.1fd52536.combine_file__09vlzwgc",
        "patch": BUG,
        "FAIL_TO_PASS": FAILING,
        "PASS_TO_PASS": [*PASSING, "tests/sub/test_far.py::test_far"],
        "image_name": "jyangballin/swesmith.x86_64.acme_1776_calc.py.1fd52536",
        "repo": "swesmith/acme__calc.py.1fd52536",
        "problem_statement": "total() is off by one",
    } | changes


def r2e_gym(**changes: Any) -> dict[str, Any]:
    return {
        "repo_name": "aiohttp",
        "docker_image": f"namanjain12/aiohttp_final:{COMMIT}",
        "commit_hash": COMMIT,
        "parsed_commit_content": json.dumps(parsed_commit(GOLD, TEST_PATCH)),
        "execution_result_content": json.dumps(
            {
                "test_file_names": ["test_1.py"],
                "old_commit_res_stdout": R2E_LOG.replace(
                    "PASSED\x1b[0m r2e_tests/test_1.py::test_total", "FAILED x::y"
                ),
                "new_commit_res_stdout": R2E_LOG,
            }
        ),
        "modified_files": ["calc.py"],
        "relevant_files": ["calc.py"],
        "num_non_test_files": 1,
        "prompt": "Write an issue.",
        "problem_statement": "[ISSUE]\n**Title:** total() is off by one\n[/ISSUE]\n",
        "expected_output_json": json.dumps(
            {
                "test_total": "PASSED",
                "\x1b[1mTestCalc.test_type": "PASSED",
                "TestCalc.test_blank[a  b - c]": "PASSED",
                "test_broken": "FAILED",
            }
        ),
    } | changes


# The output of the images' script: colours, classes, names with blanks, a test that is expected to fail.
R2E_LOG = """\
============ test session starts ============
r2e_tests/test_1.py ...F                                                  [100%]
PASSED is what a test printed::here
============ short test summary info ============
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::test_total
PASSED r2e_tests/test_1.py::TestCalc::test_type
PASSED r2e_tests/test_1.py::TestCalc::test_blank[a  b - c]
FAILED r2e_tests/test_1.py::test_broken - AssertionError: assert 1 == 2
============ 1 failed, 3 passed in 0.01s ============
"""


def parsed_commit(*patches: str) -> dict[str, Any]:
    """Return a commit with these patches as R2E-Gym's parser represents it."""
    kinds = {" ": "context", "+": "added", "-": "deleted", "\\": "note"}
    files: list[dict[str, Any]] = []
    for line in "".join(patches).splitlines():
        if head := re.fullmatch(r"diff --git a/(\S+) b/\S+", line):
            file: dict[str, Any] = {"header": {"file": {"path": head[1]}, "misc_line": None}, "hunks": []}
            files.append(file | {"index_line": None, "is_binary_file": False, "minus_file": None, "plus_file": None})
        elif line.startswith("new file mode"):
            files[-1]["header"]["misc_line"] = line
        elif line.startswith(("--- ", "+++ ")):
            files[-1]["minus_file" if line[0] == "-" else "plus_file"] = {"path": line[4:]}
        elif hunk := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)", line):
            ranges = [{"start": int(hunk[i]), "length": int(hunk[i + 1]) if hunk[i + 1] else None} for i in (1, 3)]
            descriptor = {"old_range": ranges[0], "new_range": ranges[1], "section": hunk[5]}
            files[-1]["hunks"].append({"descriptor": descriptor, "line_group": {"all_lines": []}})
        else:
            lines = files[-1]["hunks"][-1]["line_group"]["all_lines"]
            lines.append({"content": line[1:].lstrip() if line[0] == "\\" else line[1:], "type": kinds[line[0]]})
    files[-1]["hunks"][-1]["line_group"]["all_lines"].append({"content": "", "type": "context"})  # the diff's end
    return {"file_diffs": files, "old_commit_hash": "0d" * 20, "new_commit_hash": COMMIT, "commit_message": "Fix"}


PARSER = "parse_log_pytest"


def snapshot_row(instance_id: str, **changes: Any) -> dict[str, Any]:
    """Return a v5 row of a task whose image is the directory ``snapshot``."""
    return {
        "instance_id": instance_id,
        "image": "dir:snapshot",
        "repo": "a/b",
        "version": "1",
        "log_parser": PARSER,
        "eval_type": "pass_and_fail",
        "eval_script": ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n",
        "problem_statement": "It is broken.",
        "base_commit": "",
        "FAIL_TO_PASS": json.dumps(["test_a"]),
        "PASS_TO_PASS": "[]",
        **changes,
    }
