"""Eval scripts of tasks whose hidden tests are calls of one function."""

from __future__ import annotations

from collections.abc import Iterable

# The tests come on standard input, so that no file with them lies beside the code under test. -I, and appending the
# work tree to the path, keep a file there from shadowing a module of the standard library.
_EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
python3 -I -S -B - -v <<'END_OF_TESTS'
import os, sys, unittest
sys.path.append(os.getcwd())

class Hidden(unittest.TestCase):
    def check(self, {check}
{tests}
unittest.main()
END_OF_TESTS
: '>>>>> End Test Output'
"""
# With every Python version, swebench's parser for this output takes the docstring as the test's name.
_TEST = '''
    def test_{number}(self):
        """{name}"""
        self.check({given})
'''


def eval_script(check: str, tests: Iterable[tuple[str, str]]) -> str:
    """Return the eval script of hidden tests, which ``parse_log_django`` reads.

    check: the method that makes one test, after ``def check(self, ``. tests: name and further arguments of each.
    """
    made = (_TEST.format(number=number, name=name, given=given) for number, (name, given) in enumerate(tests))
    return _EVAL_SCRIPT.format(check=check, tests="".join(made))
