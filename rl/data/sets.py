"""Public sets (SWE-bench, SWE-smith, SWE-Gym, SWE-rebench, R2E-Gym and their kin): convert rows to SWE-bench v5 rows.

docs/data.md says where each fact comes from.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.data import harbor
from rl.data.evalscript import bare_eval_script, eval_script, here, reinstall, test_files, unchecked
from rl.data.fields import (
    Row,
    RowError,
    Why,
    commands,
    common_fields,
    label,
    patched_files,
    structure,
    test_names,
    text,
)
from rl.data.patches import changes, from_commit, reverse
from rl.data.source import read_rows


@dataclass(frozen=True)
class ConversionOptions:
    """The options settle what the rows alone leave open.

    recipes: v5 rows by instance id, which complete rows from before SWE-bench 5.
    regression: which PASS_TO_PASS tests of SWE-smith are kept: "all", or "same-files", only those in the same file as a
    FAIL_TO_PASS test, which run in a fraction of the time. out: the directory that paths in rows are relative to. Of
    Harbor's tasks: without_network: convert those that want a network; reward: the key of a reward that counts;
    threshold: the reward from which a task is resolved. scripts: a checkout of SWE-bench Pro's repository.
    """

    recipes: Mapping[str, Row]
    regression: Literal["all", "same-files"] = "all"
    out: Path = Path()
    without_network: bool = False
    reward: str = "reward"
    threshold: float = 1.0
    scripts: Path | None = None


@dataclass(frozen=True)
class TaskSource:
    """A task source is a public set, or what else tasks are made of: how its rows are converted, and where they are.

    convert: returns a row of ours (``rewards.task``) with lists as lists. It raises RowError or PatchError for one that
    it cannot convert. hub, split: its name on the hub, "" if it is nowhere, and the split that is usually taken. rows:
    yields the rows of a place on this machine (and of a split, if one is asked for), if these are no data files
    (``rl.data.source``); it raises SourceError.
    """

    convert: Callable[[Row, ConversionOptions], dict[str, Any]]
    hub: str = ""
    split: str = ""
    rows: Callable[[str, str | None], Iterable[Row]] | None = None

    def read(self, place: str, split: str | None) -> Iterable[Row]:
        """Return the rows of a place, as they were published. Raises SourceError, also while they are iterated over."""
        return self.rows(place, split) if self.rows else read_rows(place, split, self.split)


def swe_bench(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-bench or one of its subsets.

    Since version 5 a row is complete. An older one takes what it lacks from the v5 row of the same instance.
    """
    from swebench.harness.constants import FAIL_ONLY_REPOS
    from swebench.task.checks import EVAL_MARKERS, expected_image

    instance_id = text(row, "instance_id", Why.NO_ID)
    recipe = row if row.get("eval_script") else options.recipes.get(instance_id)
    if recipe is None or not recipe.get("eval_script"):
        raise RowError(
            Why.NO_RECIPE,
            "the row is from before SWE-bench 5 and has no eval_script; take the set's current revision, or name a "
            "file with v5 rows of these instances with --recipes",
        )
    if recipe.get("image_assets") not in (None, "", "{}", {}):
        raise RowError(Why.UNSUPPORTED, "image_assets: the tests need binary files, which a text patch cannot carry")
    script = text(recipe, "eval_script", Why.NO_RECIPE)
    if missing := [marker for marker in EVAL_MARKERS if marker not in script]:
        raise RowError(Why.NO_RECIPE, f"eval_script has no {missing[0]!r}")
    repo = text(row, "repo", Why.INVALID)
    return {
        **common_fields(row),
        # The test names must be those that the script's parser reports; version 5 corrected some.
        **{name: test_names(recipe, name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")},
        "image": recipe.get("image") or expected_image(instance_id),
        "log_parser": text(recipe, "log_parser", Why.NO_PARSER),
        "eval_type": recipe.get("eval_type") or ("fail_only" if repo in FAIL_ONLY_REPOS else "pass_and_fail"),
        "eval_script": script,
        "difficulty": label(row.get("difficulty")),
    }


# SWE-Gym uses one test command per repository for all its versions (python/mypy's differ only by -n0, which all of
# them accept). All print pytest's short summary, in which SWE-Gym's parser and swebench's find the same names.
_GYM_COMMANDS = {
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA -k",
}
_GYM_BEFORE = {"conan-io/conan": ["export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"]}


def swe_gym(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-Gym. Rows have no recipe: SWE-Gym's fork of SWE-bench keeps one per repository."""
    instance_id = text(row, "instance_id", Why.NO_ID)
    repo = text(row, "repo", Why.INVALID)
    command = _GYM_COMMANDS.get(repo.lower())
    if command is None:
        raise RowError(Why.NO_RECIPE, f"{repo} is not one of SWE-Gym's repositories")
    test_patch = text(row, "test_patch", Why.BAD_PATCH)
    if repo.lower() == "python/mypy":  # its tests are cases in data files, selected by name
        cases = re.findall(r"\[case ([^\]]+)\]", test_patch)
        if not cases:
            raise RowError(Why.NO_RECIPE, "the test patch names no [case ...] to run")
        command = f"{command} {shlex.quote(' or '.join(dict.fromkeys(cases)))}"
    else:
        command = f"{command} {_quoted_test_files(row)}"
    name = instance_id.lower().replace("__", "_s_")
    return {
        **common_fields(row),
        "image": f"xingyaoww/sweb.eval.x86_64.{name}:latest",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script([command], test_patch, _GYM_BEFORE.get(repo.lower(), ())),
    }


def swe_rebench(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-rebench, which names its image, test command and parser."""
    config = structure(row.get("install_config"), Why.NO_RECIPE, "install_config")
    if "language" in row and not row.get("docker_image"):
        raise RowError(Why.UNSUPPORTED, "a row of SWE-rebench-V2: convert it as swe-rebench-v2")
    tests = _tests(config, "test_cmd", "install_config has no test_cmd")
    test_patch = text(row, "test_patch", Why.BAD_PATCH)
    tests[-1] = f"{tests[-1]} {_quoted_test_files(row)}"
    meta = row.get("meta")
    score = structure(meta, Why.INVALID, "meta").get("llm_score") if meta else None
    difficulty = structure(score, Why.INVALID, "meta.llm_score").get("difficulty_score") if score else None
    before = ["export LANG=C.UTF-8 LC_ALL=C.UTF-8", *reinstall(commands(config.get("install")))]
    return {
        **common_fields(row),
        "image": text(row, "docker_image", Why.NO_IMAGE),
        "log_parser": text(config, "log_parser", Why.NO_PARSER),
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(tests, test_patch, before),
        "difficulty": label(difficulty),
    }


def _tests(fields: Mapping[str, Any], name: str, none: str) -> list[str]:
    """Return the commands that run the tests. Raises RowError, which says ``none`` if there are none."""
    if found := commands(fields.get(name)):
        return found
    raise RowError(Why.NO_RECIPE, none)


# The images' own HOME has what some tools keep there (modules, toolchains). Without the variable, ~ is the user's.
_HOME = "unset HOME; export HOME=~"
# SWE-rebench-V2's parsers of these names find in a log what swebench's do (docs/data.md). Its others are only there.
_REBENCH_V2_PARSERS = re.compile(
    "parse_log_(ant|cargo|cucumber|doctest|googletest|gotest|jest|jest_json|jq|karma|micropython_test|minitest|pytest"
    "|pytest_options|redis|rspec_transformed_json|ruby_unit|tap|vitest)"
)


def swe_rebench_v2(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-rebench-V2, whose images have the repository in a directory with its name."""
    config = structure(row.get("install_config"), Why.NO_RECIPE, "install_config")
    tests = _tests(config, "test_cmd", "install_config has no test_cmd")
    parser = text(config, "log_parser", Why.NO_PARSER)
    if not _REBENCH_V2_PARSERS.fullmatch(parser):
        raise RowError(Why.NO_PARSER, f"{parser} is SWE-rebench-V2's own, and in no package")
    workdir = f"/{text(row, 'repo', Why.INVALID).rpartition('/')[2]}"
    said = meta.get("llm_metadata") if isinstance(meta := row.get("meta"), dict) else None
    said = said[0] if isinstance(said, list) and said else said
    test_patch = text(row, "test_patch", Why.BAD_PATCH)
    return {
        **common_fields(row),
        "image": text(row, "image_name", Why.NO_IMAGE),
        "workdir": workdir,
        "log_parser": parser,
        "eval_type": "pass_and_fail",
        "eval_script": bare_eval_script(unchecked(tests, "-e"), [_HOME], test_patch, workdir),
        "difficulty": label(said.get("difficulty")) if isinstance(said, dict) else None,
    }


def swe_bench_live(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-bench-Live, whose Python rows are tested by pytest."""
    if row.get("log_parser") != "pytest":
        raise RowError(Why.NO_PARSER, "the row brings its parser, a program that would run outside of all boxes")
    tests = _tests(row, "test_cmds", "test_cmds is empty")
    name = text(row, "instance_id", Why.NO_ID).replace("__", "_1776_").lower()
    test_patch = text(row, "test_patch", Why.BAD_PATCH)
    return {
        **common_fields(row),
        "image": row.get("docker_image") or f"starryzhang/sweb.eval.x86_64.{name}",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": bare_eval_script(unchecked(tests, "+e"), [_HOME], test_patch),
    }


# What the instance's own parser has found, as TAP. A test that passed once has passed, as for SWE-bench Pro.
_PRO_TAP = """\
import json, sys
tests = json.load(open(sys.argv[1]))["tests"]
passed = {test["name"] for test in tests if test["status"] == "PASSED"}
failed = {test["name"] for test in tests if test["status"] in ("FAILED", "ERROR")} - passed
for number, name in enumerate(sorted(passed | failed), 1):
    print("ok" if name in passed else "not ok", number, name)
"""


def swe_bench_pro(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-bench Pro, with the script and the parser that its repository has for each instance."""
    gold = {file.new for file in patched_files(row, "patch", Why.NO_GOLD_PATCH)}
    hidden = {file.new for file in patched_files(row, "test_patch", Why.BAD_PATCH)}
    # The tests are checked out of a later commit there, and no box has that. The test patch stands for it.
    last = text(row, "before_repo_set_cmd", Why.NO_RECIPE).strip().splitlines()[-1]
    restored = re.fullmatch(r"git checkout [0-9a-f]{7,40} -- (.+)", last)
    if restored is None:
        raise RowError(Why.UNSUPPORTED, f"before_repo_set_cmd does not end with the checkout of the tests: {last}")
    if lost := {*restored[1].split()} & gold - hidden:
        raise RowError(Why.UNSUPPORTED, f"before_repo_set_cmd checks out {min(lost)}, which the gold patch changes")
    tests = {name: [*map(str.rstrip, _literal(row, name.lower()))] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    common = common_fields({**row, **tests})
    asked = [("Requirements", row.get("requirements")), ("New interfaces introduced", row.get("interface"))]
    more = "".join(f"\n\n{title}:\n{value}" for title, value in asked if isinstance(value, str) and value.strip())
    return {
        **common,
        "problem_statement": common["problem_statement"] + more,
        "image": f"jefzda/sweap-images:{text(row, 'dockerhub_tag', Why.NO_IMAGE)}",
        "workdir": "/app",
        "log_parser": "parse_log_tap",
        "eval_type": "pass_and_fail",
        "eval_script": bare_eval_script(_pro_commands(row, options), [_HOME], row["test_patch"], "/app")
        + 'tail -c 20000 "$own/out.log" "$own/err.log"\n',
    }


def _pro_commands(row: Row, options: ConversionOptions) -> list[str]:
    """Return the commands that run an instance's own script, and then its own parser. Raises RowError."""
    name = text(row, "instance_id", Why.NO_ID)
    if options.scripts is None or not re.fullmatch(r"\w[\w.-]*", name):
        needs = "its run_script.sh and parser.py are in scaleapi/SWE-bench_Pro-os: name a checkout with --scripts"
        raise RowError(Why.NO_RECIPE, needs)
    place = options.scripts / "run_scripts" / name
    try:
        run, parser = ((place / file).read_text() for file in ("run_script.sh", "parser.py"))
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(Why.NO_RECIPE, f"its scripts cannot be read: {error}") from error
    chosen = ",".join(_literal(row, "selected_test_files_to_run"))
    return [
        "set +u",
        "own=$(mktemp -d)",
        here(run, 'cat >"$own/run_script.sh"'),
        f'bash "$own/run_script.sh" {chosen} >"$own/out.log" 2>"$own/err.log"',
        here(parser, 'python -I - "$own/out.log" "$own/err.log" "$own/found.json"'),
        here(_PRO_TAP, 'python -I - "$own/found.json"'),
    ]


def _literal(row: Row, name: str) -> list[str]:
    """Return a list of texts, which a row has as such or as Python's text of one. Raises RowError."""
    value = row.get(name)
    try:
        value = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise RowError(Why.BAD_TESTS, f"{name} is no list: {error}") from error
    return test_names({name: value}, name)


_SMITH_PYTEST = "pytest --disable-warnings --color=no --tb=no --verbose"
# SWE-smith runs these repositories' tests differently. The keys are the parts of their images' names before the commit.
_SMITH_COMMANDS = {
    "mido__mido": f"{_SMITH_PYTEST} -rs -c /dev/null",
    "paramiko__paramiko": "pytest -rA --color=no --disable-warnings",
    "pydantic__pydantic": f"/root/.local/bin/uv run {_SMITH_PYTEST}",
    "tornadoweb__tornado": "python -m tornado.test --verbose",
    "un33k__python-slugify": "python test.py --verbose",
}
_SMITH_UNITTEST = ("tornadoweb__tornado", "un33k__python-slugify")


def swe_smith(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of SWE-smith, whose `patch` makes the bug.

    The gold patch is the reverse of `patch`. The task's tree is the image's tree with the bug applied and, for the
    agent, without the files of the failing tests.
    """
    instance_id = text(row, "instance_id", Why.NO_ID)
    # owner__repo.commit.kind__hash; the repository's name may contain dots
    parts = re.fullmatch(r"((.+?)__(.+))\.([0-9a-f]{8})\.[^.]+", instance_id)
    if not parts:
        raise RowError(Why.NO_IMAGE, "the instance id is not owner__repo.commit.bug, which gives image and recipe")
    key, owner, repo, commit = parts.groups()
    bug = text(row, "patch", Why.NO_GOLD_PATCH)
    failing, passing = (test_names(row, name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    command, failing_files, parser = _smith_command(key.lower(), failing)
    if failing_files:
        if options.regression == "same-files":
            passing = [test for test in passing if test.split("::")[0] in failing_files]
        files = sorted({test.split("::")[0] for test in [*failing, *passing]})
        command = f"{command} {shlex.join(files)}"
    gold = reverse(bug)
    changes(gold)  # raises PatchError unless the result is a patch
    restore = [f"git checkout HEAD -- {shlex.join(failing_files)}"] if failing_files else []
    return {
        "instance_id": instance_id,
        "repo": f"{owner}/{repo}",
        "version": commit,
        "base_commit": row.get("base_commit") or "",
        "problem_statement": text(row, "problem_statement", Why.NO_STATEMENT),
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": passing,
        "patch": gold,
        "setup_patch": bug,
        "hidden_paths": failing_files,
        "image": _smith_image(row.get("image_name"), owner, repo, commit),
        "log_parser": parser,
        "eval_type": "pass_and_fail",
        "eval_script": eval_script([command], before=restore),
    }


def _smith_command(key: str, failing: Sequence[str]) -> tuple[str, list[str], str]:
    """Return the test command, the files of the failing tests if the command takes files, and the output's parser."""
    if key in _SMITH_UNITTEST:
        return _SMITH_COMMANDS[key], [], "parse_log_django"
    files = sorted({test.split("::")[0] for test in failing})
    if strange := [file for file in files if not file.endswith(".py")]:
        why = "of other languages, no row says which files an agent must not see"
        raise RowError(Why.NO_RECIPE, f"{strange[0]!r} is not a pytest file; {why}")
    # SWE-smith's parser reads pytest's verbose lines; swebench's reads the short summary, where -rap lists all tests.
    return f"{_SMITH_COMMANDS.get(key, _SMITH_PYTEST)} -rap", files, "parse_log_pytest"


def _smith_image(name: Any, owner: str, repo: str, commit: str) -> str:
    """Return the published image's name. Rows from before SWE-smith published its images hold the name of a local
    image, which has no namespace."""
    if isinstance(name, str) and "/" in name:
        return name
    return f"jyangballin/swesmith.x86_64.{owner}_1776_{repo}.{commit}".lower()


# R2E-Gym's images contain these files in or beside the work tree; the agent must not see them.
_R2E_HIDDEN = [
    "/r2e_tests",
    "r2e_tests",
    "run_tests.sh",
    "syn_issue.json",
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "modified_files.json",
    "modified_entities.json",
]
# R2E-Gym names a test by what follows its file, with dots, and cuts the name at " - ". The image's own script runs the
# tests; this command rewrites its summary so that swebench's parser reads these names.
_R2E_RENAME = (
    r"sed -E -e 's/\x1b\[[0-9;]*m//g'"
    r" -e '/short test summary info/,$ { /^[A-Z]+ [^ :]*::/ { s/ - .*//; s/^([A-Z]+) [^ :]*::/\1 /; s/::/./g } }'"
)


def r2e_gym(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a row of R2E-Gym.

    The image contains the tests and the script that runs them. The row has the expected results, and the gold patch
    as a parsed commit.
    """
    if not row.get("expected_output_json"):
        raise RowError(Why.NO_FAILING_TEST, "no expected_output_json (R2E-Gym's copies of SWE-bench have none)")
    repo, commit = text(row, "repo_name", Why.INVALID), text(row, "commit_hash", Why.NO_ID)
    expected = structure(row["expected_output_json"], Why.BAD_TESTS, "expected_output_json")
    before = _r2e_results_before(row)
    should_pass = _r2e_passing(expected)
    failing = [name for name in should_pass if before.get(name) != "PASSED"]
    if not failing:
        raise RowError(Why.NO_FAILING_TEST, "according to execution_result_content no test fails before the commit")
    parsed = structure(row.get("parsed_commit_content"), Why.NO_GOLD_PATCH, "parsed_commit_content")
    patch, base_commit = from_commit(parsed)
    if not patch:
        raise RowError(Why.NO_GOLD_PATCH, "the commit changes no Python file except tests")
    changes(patch)  # raises PatchError unless the result is a patch
    statement = text(row, "problem_statement", Why.NO_STATEMENT)
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    copy = "rm -rf r2e_tests && cp -r /r2e_tests r2e_tests"
    return {
        "instance_id": f"{repo}__{repo}-{commit}",
        "repo": repo,
        "version": "",
        "base_commit": base_commit,
        "problem_statement": issue[1].strip() if issue else statement,
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": [name for name in should_pass if before.get(name) == "PASSED"],
        "patch": patch,
        "hidden_paths": _R2E_HIDDEN,
        "image": text(row, "docker_image", Why.NO_IMAGE),
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "eval_script": bare_eval_script([f"bash run_tests.sh 2>&1 | {_R2E_RENAME}"], [copy]),
    }


def _r2e_passing(results: Row) -> list[str]:
    """Return the names of passed tests as the rewritten summary has them: no colours, single blanks, cut at " - "."""
    plain = {re.sub(r"\x1b\[[0-9;]*m", "", name).split(" - ")[0]: result for name, result in results.items()}
    return sorted({" ".join(name.split()) for name, result in plain.items() if result == "PASSED" and name.strip()})


def _r2e_results_before(row: Row) -> dict[str, str]:
    """Return test results before the commit, by test name, from the log that the row keeps."""
    kept = structure(row.get("execution_result_content"), Why.BAD_TESTS, "execution_result_content")
    said = kept.get("old_commit_res_stdout")
    log = re.sub(r"\x1b\[[0-9;]*m", "", said if isinstance(said, str) else "")
    summary = log.partition("short test summary info")[2]
    return {
        " ".join(name.replace("::", ".").split(" - ")[0].split()): result
        for result, name in re.findall(r"^([A-Z]+) [^\s:]*::(.*)$", summary, re.MULTILINE)
    }


def _quoted_test_files(row: Row) -> str:
    """Return the files of the test patch that a test runner takes, as shell words. Raises RowError."""
    files = test_files(patched_files(row, "test_patch", Why.BAD_PATCH))
    if not files:
        raise RowError(Why.NO_RECIPE, "the test patch has no file that could contain tests")
    return shlex.join(files)


SETS: dict[str, TaskSource] = {
    "swe-bench": TaskSource(swe_bench, "SWE-bench/SWE-bench", "test"),
    "swe-bench-lite": TaskSource(swe_bench, "SWE-bench/SWE-bench_Lite", "test"),
    "swe-bench-verified": TaskSource(swe_bench, "SWE-bench/SWE-bench_Verified", "test"),
    "swe-bench-multilingual": TaskSource(swe_bench, "SWE-bench/SWE-bench_Multilingual", "test"),
    "swe-bench-pro": TaskSource(swe_bench_pro, "ScaleAI/SWE-bench_Pro", "test"),
    "swe-bench-live": TaskSource(swe_bench_live, "SWE-bench-Live/SWE-bench-Live", "full"),
    "swe-smith": TaskSource(swe_smith, "SWE-bench/SWE-smith", "train"),
    "swe-gym": TaskSource(swe_gym, "SWE-Gym/SWE-Gym", "train"),
    "swe-rebench": TaskSource(swe_rebench, "nebius/SWE-rebench", "filtered"),
    "swe-rebench-v2": TaskSource(swe_rebench_v2, "nebius/SWE-rebench-V2", "train"),
    "r2e-gym": TaskSource(r2e_gym, "R2E-Gym/R2E-Gym-Subset", "train"),
    "harbor": TaskSource(harbor.convert, rows=harbor.rows),
}


def source_named(name: str) -> TaskSource:
    """Return a set of ours, or the source of another package (``module:attribute``). Raises ValueError."""
    from rl.config.plugins import named  # Hydra takes a third of a second

    found = named(name, SETS)
    if not isinstance(found, TaskSource):
        raise ValueError(f"is {name!r}, which is no rl.data.sets.TaskSource")
    return found
