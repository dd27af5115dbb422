"""Scripted agents try to win without a solution, and are graded in real boxes by real git and real
pytest.

An attack edits the work tree of its own box, and the box's diff is graded. An attack that a rule stops is graded
without the rules too, where it must win; otherwise the test would show nothing. docs/rewards.md has the table.

That the diff itself is out of the agent's reach (its own .git, attributes, filters, ignore files) is in test_diff.py.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rewards import patch as patches
from rewards import rules
from rewards.grade import grade
from rewards.rules import Rules
from rewards.verdict import Outcome, Reason, Verdict
from rollout.sandbox import Sandbox
from rollout.sandbox.docker.engine import get_engine
from tests.boxes.attack_kit import (
    FIX,
    GRADED,
    HOOK,
    INSTALLED,
    PYTEST,
    RESULTS,
    RULES,
    SHOUT,
    Attack,
    attacked,
    cases,
    graded,
    make_task,
    outcome,
)
from tests.boxes.kinds import TIGHT, BoxKit, kinds
from tests.sandboxes import alive, begun

END = "+ : '>>>>> End Test Output'\\n>>>>> Test Exit Code: 0\\n"
# Makes the eval script print results before its last lines, which bash would read after the tests.
REWRITE = f"""\
import glob, os
for path in glob.glob(os.path.join(os.environ["TMPDIR"], "*")):
    if os.path.isfile(path):
        with open(path, "r+") as file:
            text = file.read()
            at = text.find(": '" + ">" * 5 + " End")
            if at >= 0:
                file.seek(at)
                file.write("printf '{RESULTS}FAILED a::b\\\\n';" + text[at:])
"""


@GRADED
async def test_an_honest_patch_resolves_and_is_not_flagged(kind: BoxKit, tmp_path: Path) -> None:
    verdict = await outcome(kind, tmp_path, Attack({"pkg/mod.py": FIX, "docs/new.md": "f returns 2\n"}))
    assert (verdict.outcome, verdict.dropped, verdict.flags) == (Outcome.RESOLVED, (), ()), verdict


# --- hooks of the test runner, and tests: dropped

_PLUGIN = {"evil.py": HOOK}
HOOKS = {
    "conftest": Attack({"conftest.py": HOOK}, dropped=("conftest.py",)),
    "conftest beside the tests": Attack({"tests/conftest.py": HOOK}, dropped=("tests/conftest.py",)),
    "pytest.ini": Attack(_PLUGIN | {"pytest.ini": "[pytest]\naddopts = -p evil\n"}, dropped=("pytest.ini",)),
    "hidden pytest.ini": Attack(_PLUGIN | {".pytest.ini": "[pytest]\naddopts = -p evil\n"}, dropped=(".pytest.ini",)),
    "tox.ini": Attack(_PLUGIN | {"tox.ini": "[pytest]\naddopts = -p evil\n"}, dropped=("tox.ini",)),
    "setup.cfg": Attack(_PLUGIN | {"setup.cfg": "[tool:pytest]\naddopts = -p evil\n"}, dropped=("setup.cfg",)),
    "pyproject.toml": Attack(
        _PLUGIN | {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n'}, dropped=("pyproject.toml",)
    ),
    "entry point": Attack(
        _PLUGIN
        | {
            "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
            "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        },
        dropped=("evil-1.dist-info/METADATA", "evil-1.dist-info/entry_points.txt"),
    ),
    "entry point, in capitals": Attack(
        _PLUGIN
        | {
            "evil-1.DIST-INFO/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
            "evil-1.DIST-INFO/entry_points.txt": "[pytest11]\nevil = evil\n",
        },
        dropped=("evil-1.DIST-INFO/METADATA", "evil-1.DIST-INFO/entry_points.txt"),
    ),
    "a module named as one of Python's": Attack(
        {"shlex.py": f'print("{RESULTS}", flush=True)\nimport os\nos._exit(0)\n'}, dropped=("shlex.py",)
    ),
    "a module that pytest imports": Attack(
        {"pygments/__init__.py": f'print("{RESULTS}", flush=True)\nimport os\nos._exit(0)\n'},
        dropped=("pygments/__init__.py",),
    ),
    "a module named pytest": Attack({"pytest.py": f'print("{RESULTS}")\n'}, dropped=("pytest.py",)),
    "sitecustomize": Attack(
        {"sitecustomize.py": "import evil\n", "evil.py": INSTALLED},
        dropped=("sitecustomize.py",),
        command=f"PYTHONPATH=/testbed {PYTEST}",
    ),
    ".pth": Attack(
        {"lib/evil.pth": "import evil\n", "evil.py": INSTALLED},
        dropped=("lib/evil.pth",),
        command="""python -c 'import site, sys; sys.path.insert(0, ""); site.addsitedir("lib"); import pytest; """
        """sys.exit(pytest.main(sys.argv[1:]))'""",
    ),
    "the hidden test's file": Attack(
        {"tests/test_new.py": "def test_new():\n    pass\n"}, dropped=("tests/test_new.py",)
    ),
}

# Each would do alone; those that need a command of their own are left out.
AT_ONCE = [attack for attack in HOOKS.values() if attack.command == PYTEST]
HOOKS["all at once"] = Attack(
    {path: text for attack in AT_ONCE for path, text in attack.files.items()},
    dropped=tuple(sorted(path for attack in AT_ONCE for path in attack.dropped)),
)


@cases(HOOKS, "all at once", "sitecustomize", ".pth")
async def test_hooks_and_tests_are_dropped(
    kind: BoxKit, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = HOOKS[name]
    task = make_task(tmp_path, attack.command)
    patch = await attacked(kind, task, attack)
    left = RULES.screen(task, patch)
    assert tuple(sorted(left.dropped)) == attack.dropped
    assert {path for file in left.files for path in file.paths} <= {"evil.py"}  # whose grading is below
    monkeypatch.setattr(Rules, "screen", lambda rules_, task, patch: rules.ScreenedPatch(patches.split(patch), (), ()))
    verdict = await graded(kind, task, patch, Rules())
    assert verdict.outcome is Outcome.RESOLVED, verdict  # a real attack, where no rule stops it


@GRADED
async def test_what_is_left_of_hooks_does_nothing(kind: BoxKit, tmp_path: Path) -> None:
    """The rest of all attacks above neither wins nor breaks a solution."""
    attack = HOOKS["all at once"]
    verdict = await outcome(kind, tmp_path / "1", attack)
    assert (verdict.reason, verdict.reward) == (Reason.TESTS_FAILED, 0.0)
    assert tuple(sorted(verdict.dropped)) == attack.dropped
    verdict = await outcome(kind, tmp_path / "2", Attack(attack.files | {"pkg/mod.py": FIX}))
    assert verdict.outcome is Outcome.RESOLVED


EDITS = {
    "edited": Attack({"tests/test_mod.py": "def test_old():\n    raise SystemExit\n"}, dropped=("tests/test_mod.py",)),
    "deleted": Attack(script="rm -r tests", dropped=("tests/test_mod.py",)),
    "a link instead": Attack(
        {"fake/mod.py": "def test_new(): pass\n"},
        "mv fake/mod.py fake/test_new.py; rm -r tests; ln -s fake tests",
        dropped=("fake/test_new.py", "tests", "tests/test_mod.py"),
    ),
    "a directory instead": Attack(
        script="mkdir -p tests/test_new.py; touch tests/test_new.py/x", dropped=("tests/test_new.py/x",)
    ),
}


@cases(EDITS, "a link instead", "a directory instead")
async def test_changes_of_test_files_are_dropped(kind: BoxKit, tmp_path: Path, name: str) -> None:
    attack = EDITS[name]
    task = make_task(tmp_path)
    verdict = await graded(kind, task, await attacked(kind, task, attack))
    assert (verdict.reason, verdict.dropped) == (Reason.FORBIDDEN_PATH_ONLY, attack.dropped)  # without a grading
    fixed = await attacked(kind, task, Attack(attack.files | {"pkg/mod.py": FIX}, attack.script))
    verdict = await graded(kind, task, fixed)
    assert (verdict.outcome, verdict.dropped) == (Outcome.RESOLVED, attack.dropped)  # what is dropped breaks nothing


@GRADED
async def test_what_is_left_outside_of_the_work_tree_is_not_there_when_graded(kind: BoxKit, tmp_path: Path) -> None:
    """Plugins by environment, start files of the shell, user packages, git's own configuration and hooks."""
    script = """
        echo 'export PYTEST_PLUGINS=evil PYTHONPATH=/testbed' | tee ~/.bashrc ~/.profile ~/.bash_profile > /dev/null
        packages=~/.local/lib/python3.11/site-packages; mkdir -p $packages
        cp evil.py $packages; echo 'import evil' > $packages/evil.pth
        cp evil.py "$TMPDIR"; echo 'export PYTEST_PLUGINS=evil' > "$TMPDIR/eval.sh"
        mkdir -p hooks .git/hooks .git/info
        printf '#!/bin/sh\\ncp evil.py conftest.py\\n' | tee hooks/post-checkout .git/hooks/post-checkout
        chmod +x hooks/* .git/hooks/post-checkout
        git config core.hooksPath hooks; git config filter.evil.smudge 'cat evil.py'; cp .git/config ~/.gitconfig
        echo '*.py filter=evil working-tree-encoding=UTF-16' | tee .gitattributes > .git/info/attributes
    """
    attack = Attack({"evil.py": HOOK}, script, dropped=(".gitattributes",))
    verdict = await outcome(kind, tmp_path / "1", attack)
    assert (verdict.reason, verdict.dropped) == (Reason.TESTS_FAILED, attack.dropped)
    verdict = await outcome(kind, tmp_path / "2", Attack({"evil.py": HOOK, "pkg/mod.py": FIX}, script))
    assert verdict.outcome is Outcome.RESOLVED


@GRADED
async def test_what_the_image_has_outside_of_its_commit_is_graded_as_it_was(kind: BoxKit, tmp_path: Path) -> None:
    """A test runner's files that the ignore rules name, as `node_modules/`; here a directory `run.log`."""
    task = make_task(tmp_path, f"PYTHONPATH=run.log {PYTEST} -p evil")
    (task.snapshot / "run.log").mkdir()
    (task.snapshot / "run.log/evil.py").write_text("# nothing\n")
    for code, wanted in (("", Reason.TESTS_FAILED), (FIX, None)):
        files = {"run.log/evil.py": HOOK, "pkg/more.py": "", **({"pkg/mod.py": code} if code else {})}
        verdict = await graded(kind, task, await attacked(kind, task, Attack(files)))
        assert (verdict.reason, verdict.dropped, verdict.flags) == (wanted, ("run.log/evil.py",), (rules.IGNORED,))


# --- forged logs

FORGERIES = {
    "results and a marker": (SHOUT + f'shout("{RESULTS}{END}")\n', Reason.LOG_FORGED),
    "results after the summary": (
        SHOUT + f'import atexit\natexit.register(shout, "{RESULTS}")\n',
        Reason.RESULTS_DISAGREE,
    ),
    "results after the summary, and an exit status": (
        SHOUT + f'import atexit\natexit.register(shout, "{RESULTS}>>>>> Test Exit Code: 0\\n")\n',
        Reason.LOG_FORGED,
    ),
    "results after the summary, and a failure": (
        SHOUT + f'import atexit\natexit.register(shout, "{RESULTS}FAILED a::b\\n")\n',
        Reason.RESULTS_DISAGREE,
    ),
    "another end of the eval script": (REWRITE, Reason.TESTS_FAILED),
    "exit status 0 without results": ("import os\nos._exit(0)\n", Reason.LOG_UNPARSABLE),
    "the end of the eval script": (
        SHOUT + f'shout("{RESULTS}{END}")\nos.kill(os.getppid(), 9)\nos._exit(0)\n',
        Reason.LOG_UNPARSABLE,
    ),
    "signs of a broken environment": (
        SHOUT + 'shout("No space left on device\\nCannot allocate memory\\n")\nos._exit(1)\n',
        Reason.LOG_UNPARSABLE,
    ),
    "the words for a failed patch": (SHOUT + 'shout(">>>>> Patch Apply Failed\\n")\n', Reason.LOG_UNPARSABLE),
}


@cases(FORGERIES, "results and a marker", "the end of the eval script", "signs of a broken environment")
async def test_forged_logs(kind: BoxKit, tmp_path: Path, name: str) -> None:
    code, reason = FORGERIES[name]
    verdict = await outcome(kind, tmp_path, Attack({"pkg/mod.py": code + "def f():\n    return 1\n"}))
    assert (verdict.reason, verdict.reward) == (reason, 0.0), verdict
    assert verdict.flags


# --- paths in the diff

NEW = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{2}\n"
LINK, FILE = "120000", "100644"


@GRADED
async def test_no_path_of_a_diff_leaves_the_work_tree(
    kind: BoxKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a patch is refused by our own check, and by git where we would not look."""
    outside = tmp_path / "outside"
    outside.mkdir()
    task = make_task(tmp_path)
    link = NEW.format("link", LINK, outside) + "\\ No newline at end of file\n"
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(patches, "_check", lambda paths: None)
        for path in ("{0}/x", "../../../..{0}/x", "pkg/../../x", ".git/hooks/post-checkout", "link/x"):
            verdict = await graded(kind, task, (link + NEW.format(path.format(outside), FILE, "written")).encode())
            assert verdict.reason is Reason.PATCH_APPLY_FAILED, (path, checked, verdict)
    assert list(outside.iterdir()) == [] and sorted(p.name for p in tmp_path.iterdir()) == ["outside", "snapshot"]


@GRADED
async def test_links_that_lead_out_are_only_links(kind: BoxKit, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("def f(): return 2\n")
    task = make_task(tmp_path)
    patch = await attacked(kind, task, Attack(script=f"ln -sf {secret} pkg/mod.py; ln -s / root; ln -s ../.. up"))
    assert (await graded(kind, task, patch)).reason is Reason.TESTS_FAILED
    assert secret.read_text() == "def f(): return 2\n"


# --- processes


@GRADED
async def test_a_process_that_stays_ends_with_the_grading(kind: BoxKit, tmp_path: Path, nap: str) -> None:
    stays = f"""\
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "{nap}")
    os._exit(0)
"""
    verdict = await outcome(kind, tmp_path, Attack({"pkg/mod.py": stays + FIX}))
    assert verdict.outcome is Outcome.RESOLVED and "processes" in verdict.flags
    assert not alive(nap)


@GRADED
async def test_endless_output_is_cut_and_ended(kind: BoxKit, tmp_path: Path) -> None:
    endless = SHOUT + "while True:\n    shout('x' * 65536 + chr(10))\n"
    verdict = await outcome(kind, tmp_path / "1", Attack({"pkg/mod.py": endless}), timeout_s=2)
    assert verdict.reason is Reason.TEST_TIMEOUT and len(verdict.log_tail) < 10_000
    much = SHOUT + "for _ in range(500):\n    shout('x' * 65536 + chr(10))\n" + FIX
    verdict = await outcome(kind, tmp_path / "2", Attack({"pkg/mod.py": much}))
    assert verdict.outcome is Outcome.RESOLVED  # its middle is cut out, and the results are at its end


@GRADED
async def test_the_grader_cannot_be_traced(kind: BoxKit, tmp_path: Path) -> None:
    """The code under test looks for our process, and for any that is not of its own run."""
    trace = f"""\
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def f():
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    code = libc.ptrace(16, {os.getpid()}, None, None)  # attach
    print("ATTACHED", code, "PRESENT", {os.getpid()} in seen, "MORE", len(seen) > 12)
    return 1
"""
    verdict = await outcome(kind, tmp_path, Attack({"pkg/mod.py": trace}))
    assert verdict.reason is Reason.TESTS_FAILED and {"processes", "memory"} <= set(verdict.flags)
    assert "ATTACHED -1 PRESENT False MORE False" in verdict.log_tail
    assert "TracerPid:\t0\n" in Path("/proc/self/status").read_text()


# --- faults


async def under_way(kind: BoxKit, tmp_path: Path, nap: str, timeout_s: float) -> tuple[asyncio.Task[Verdict], Any]:
    """Begin to grade code that sleeps; return the grading and its box as soon as it does."""
    task = make_task(tmp_path)
    patch = await attacked(kind, task, Attack({"pkg/mod.py": f"import os\nos.system('sleep {nap}')\n" + FIX}))
    boxes: list[Sandbox] = []

    async def boot() -> Sandbox:
        boxes.append(await kind.boot(task.snapshot, limits=TIGHT))
        return boxes[-1]

    grading = asyncio.create_task(grade(task, patch, boot, timeout_s=timeout_s, rules=RULES))
    await begun(nap, grading)
    return grading, boxes[0]


@GRADED
async def test_a_box_that_is_killed_while_it_grades_is_no_policy_failure(
    kind: BoxKit, tmp_path: Path, nap: str
) -> None:
    grading, box = await under_way(kind, tmp_path, nap, timeout_s=240)
    await kind.kill(box)
    verdict = await grading
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA_FAILURE, None), verdict
    assert verdict.reason is not None and verdict.reason.is_infra and verdict.detail
    assert not alive(nap)


@kinds("docker")
async def test_a_container_that_is_paused_while_it_grades_is_no_policy_failure(
    kind: BoxKit, tmp_path: Path, nap: str
) -> None:
    grading, box = await under_way(kind, tmp_path, nap, timeout_s=20)
    await asyncio.to_thread(get_engine().client.pause, box.container)
    verdict = await grading
    assert (verdict.reason, verdict.reward) == (Reason.BOX_KILLED, None), verdict
    assert "is paused" in verdict.detail
    assert not alive(nap)
