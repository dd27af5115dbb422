"""Eval scripts of tasks whose hidden tests are calls of one module's functions."""

from __future__ import annotations

from collections.abc import Iterable

# The tests are in a file, so that a second opinion can make them wrong (rewards.second). -I, and appending the work
# tree to the path, keep a file there from shadowing a module of the standard library.
_EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
rm -rf hidden_tests.py
cat >hidden_tests.py <<'END_OF_TESTS'
import os, sys, unittest
sys.path.append(os.getcwd())

def value(call):
    import {module}
    return eval(call, vars({module}))

class Hidden(unittest.TestCase):
{tests}
unittest.main()
END_OF_TESTS
: '>>>>> Start Test Output'
python3 -I -S -B hidden_tests.py -v
: '>>>>> End Test Output'
"""
# With every Python version, swebench's parser for this output takes the docstring as the test's name.
_TEST = '''
    def test_{number}(self):
        """{name}"""
        self.assertEqual(value({call!r}), {expected})
'''


def eval_script(module: str, tests: Iterable[tuple[str, str, object]]) -> str:
    """Return the eval script of hidden tests, which ``parse_log_django`` reads.

    module: the name of the one that is called. tests: name, call and what it must return (as source, or a number) of
    each.
    """
    made = (
        _TEST.format(number=number, name=name, call=call, expected=expected)
        for number, (name, call, expected) in enumerate(tests)
    )
    return _EVAL_SCRIPT.format(module=module, tests="".join(made))
