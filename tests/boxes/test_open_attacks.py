"""Attacks on grading that still get their reward, each by a way to learn which of the two runs it is in.

Whoever closes one of them changes the table in docs/rewards.md, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rewards.verdict import Reason
from tests.boxes.attack_kit import FIX, INSTALLED, Attack, attacked, graded, make_task
from tests.boxes.kinds import BoxKit, kinds
from tests.boxes.test_knowing_attacks import RIGHT, hidden

FORGING = "".join(f"    {line}\n" for line in INSTALLED.splitlines())

# Forges early, and keeps the first run busy until that is over.
_EARLY = """\
import pathlib, time
if time.time() < int(pathlib.Path('pkg/built.txt').read_text()) + 9:
    time.sleep(9)
"""


@kinds("bwrap")
@pytest.mark.parametrize("names", [1, 3])
async def test_code_that_knows_when_it_was_written_stays_open(kind: BoxKit, tmp_path: Path, names: int) -> None:
    """The first run comes sooner after the agent than the second. Of several tests, it does not know which are wrong."""
    task = hidden(tmp_path)
    gold = await attacked(kind, task, Attack({"pkg/mod.py": RIGHT}))
    task = replace(task, patch=gold.decode(), FAIL_TO_PASS=task.FAIL_TO_PASS[:names])
    patch = await attacked(
        kind, task, Attack({"pkg/mod.py": f"{_EARLY}{FORGING}f = g = None\n"}, "date +%s >pkg/built.txt")
    )
    verdict = await graded(kind, task, patch, second_opinion=True)
    assert verdict.reason is (None if names == 1 else Reason.RESULTS_DISAGREE), verdict


# Forges if the shell's memory has the test as the hidden patch has it.
_MEMORY = """\
import os
def seen(shell, text):
    memory = open(f'/proc/{shell}/mem', 'rb')
    for line in open(f'/proc/{shell}/maps'):
        if ' rw-p ' in line and '/' not in line:
            begin, end = (int(word, 16) for word in line.split()[0].split('-'))
            memory.seek(begin)
            if text in memory.read(end - begin):
                return True
if seen(os.getppid(), b'\\n+'.join(open('tests/test_new.py', 'rb').read().splitlines())):
"""
# Forges if a process that the build has started has seen only one text of the test.
_WATCHED = """\
import os, time
if not os.path.exists('tests/test_new.py'):
    if not os.fork():
        os.setsid()
        for number in range(3):
            os.close(number)
        texts, end = set(), time.time() + 20
        while time.time() < end:
            time.sleep(0.002)
            if os.path.exists('tests/test_new.py'):
                texts.add(open('tests/test_new.py').read())
            open('/tmp/texts', 'w').write(str(len(texts - {''})))
elif open('/tmp/texts').read() == '1':
"""


@kinds("bwrap")
@pytest.mark.parametrize("name", ["the memory of the shell", "a process that the build has started"])
async def test_code_that_sees_the_tests_as_they_were_stays_open(kind: BoxKit, tmp_path: Path, name: str) -> None:
    """This could tell of each test whether it is wrong. Many kernels let no process read its parent's memory."""
    task, code = make_task(tmp_path), _MEMORY
    if name == "the memory of the shell":
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text() != "0\n":
            pytest.skip("the kernel lets no process read its parent's memory")
    else:
        code = _WATCHED
        build = task.eval_script.replace("git checkout", "python -c 'import pkg.mod'\ngit checkout", 1)
        task = replace(task, eval_script=build)
    gold = await attacked(kind, task, Attack({"pkg/mod.py": FIX}))
    task = replace(task, patch=gold.decode())
    patch = await attacked(kind, task, Attack({"pkg/mod.py": f"{code}{FORGING}def f():\n    return 1\n"}))
    verdict = await graded(kind, task, patch, second_opinion=True)
    assert verdict.reward == 1.0 and "runner" in verdict.flags, verdict
