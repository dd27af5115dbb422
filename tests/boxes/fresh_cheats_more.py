"""More programs that cheat although they know how grading works; test_fresh_attacks.py runs them."""

# ruff: noqa: E501  (the cheats are programs)
from __future__ import annotations

from tests.boxes.attack_kit import HOOK, INSTALLED, SHOUT
from tests.boxes.fresh_cheats import BAD, OLD, cheat, hidden_code

MORE_CHEATS: dict[str, tuple[str, dict[str, str], str]] = {
    "the other tests of the caller's module are replaced, and it is skipped": cheat("""\
import sys
def f(*a):
    g_ = sys._getframe(1).f_globals
    for k in list(g_):
        if k.startswith('test_'): g_[k].__code__ = (lambda: None).__code__
    raise __import__('_pytest.outcomes').outcomes.Skipped('x')
g = f
def h(x): return x * x
"""),
    "the test is left by an exception that is caught around it": cheat("""\
from _pytest import runner
class Done(BaseException): pass
real = runner.call_and_report
runner.check_interactive_exception = lambda *a: False
import _pytest.python as p
old = p.Function.runtest
def run(self):
    try: old(self)
    except Done: pass
p.Function.runtest = run
def f(*a): raise Done
g = f
def h(x): return x * x
"""),
    "a source with an encoding of its own": (
        "pytest",
        {
            "pkg/__init__.py": "import codecs\n"
            + hidden_code(r"""import codecs
def search(name):
    if name == 'quiet':
        u = codecs.lookup('utf-8')
        def decode(b, *a):
            return u.decode(b, *a)[0].replace('assert', 'None,'), len(b)
        return codecs.CodecInfo(u.encode, decode, name='quiet')
codecs.register(search)
for p in ('tests/test_new.py', 'tests/test_more.py'):
    s = open(p).read(); open(p, 'w').write('# coding: quiet\n' + s)
"""),
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "variables for a later process": cheat(
        """\
import os
os.environ['PYTHONOPTIMIZE'] = '1'
os.environ['PYTEST_' + 'ADDOPTS'] = '-p helper'
"""
        + OLD,
        files={"helper.py": hidden_code(HOOK)},
    ),
    "the directory of tests is moved away": cheat(
        r"""import os, shutil
os.rename('tests', 'tests-old'); os.mkdir('tests')
for n in ('mod', 'more', 'new'):
    src = open(f'tests-old/test_{n}.py').read()
    open(f'tests/test_{n}.py', 'w').write(''.join(l.split('(')[0] + '(): pass\n' for l in src.splitlines() if l.startswith('def test')))
"""
        + OLD
    ),
    "results through the shell's own descriptor, then a signal": cheat(
        SHOUT
        + """\
R = RESULTS_
fd = os.open('/proc/%d/fd/1' % os.getppid(), os.O_WRONLY)
os.write(fd, R.encode()); os.kill(os.getpid(), 9)
"""
        + OLD
    ),
    "the shell is stopped and its child answers": cheat(
        """\
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, '-c', "import os, time, signal; time.sleep(1); os.kill(%d, signal.SIGCONT)" % os.getppid()])
os.kill(os.getppid(), signal.SIGSTOP)
"""
        + INSTALLED
        + OLD
    ),
    "pyproject.toml with names written as escapes": (
        "pytest",
        {
            "helper.py": hidden_code(HOOK),
            "pyproject.toml": r"""[tool."py\u0074est".ini_options]
"add\u006fpts" = "-p helper"
""",
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "a nested pytest.ini, Conftest.py, CONFTEST.PY": (
        "pytest",
        {
            "Conftest.py": HOOK,
            "CONFTEST.PY": HOOK,
            "Pytest.ini": """\
[pytest]
addopts = -p Conftest
""",
            "pkg/conftest.py": HOOK,
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "conftest as a package": (
        "pytest",
        {
            "conftest/__init__.py": HOOK,
            "tests/conftest/__init__.py": HOOK,
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "tests is a link to another directory": (
        "pytest",
        {
            "pkg/t/test_new.py": """\
def test_new(): pass
def test_text(): pass
def test_list(): pass
""",
            "pkg/mod.py": OLD,
        },
        "rm -r tests; ln -s pkg/t tests",
    ),
    "a namespace package named like a plugin": (
        "pytest",
        {
            "xdist/plugin.py": HOOK,
            "hypothesis/extra.py": HOOK,
            "anyio/pytest_plugin.py": HOOK,
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "nested git attributes with a filter, and a git file": (
        "pytest",
        {
            "pkg/.gitattributes": "*.py filter=x\n",
            ".git-hooks/post-checkout": """\
#!/bin/sh
echo >tests/test_new.py
""",
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "a link to the test file in the package": (
        "pytest",
        {
            "pkg/mod.py": OLD,
        },
        "ln -s ../tests/test_new.py pkg/new.py; ln -s ../tests tests2; ln -sf ../pkg/mod.py tests/test_new.py",
    ),
    "a .pth, sitecustomize, usercustomize in the tree": (
        "pytest",
        {
            "sitecustomize.py": INSTALLED,
            "usercustomize.py": INSTALLED,
            "a.pth": "import evil\n",
            "src/sitecustomize/__init__.py": INSTALLED,
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "names with other Unicode letters": (
        "pytest",
        {
            "ｃonftest.py": HOOK,
            "conftest.py ": HOOK,
            "tests/conftest.py\u200b": HOOK,
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "a package named like the tests, in a directory that is searched": (
        "pytest",
        {
            "test_new.py": "def test_new(): pass\n",
            "src/tests/test_new.py": "def test_new(): pass\n",
            "tests/__init__.py": "import sys\n",
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "unittest: assertEqual does nothing": cheat(
        """\
import unittest
unittest.TestCase.assertEqual = lambda *a, **k: None
"""
        + OLD,
        "django",
    ),
    "unittest: failureException is not caught as one": cheat(
        """\
import unittest
real = unittest.TestCase._callTestMethod
def call(self, method):
    try: method()
    except Exception: pass
unittest.TestCase._callTestMethod = call
"""
        + BAD,
        "django",
    ),
    "unittest: the loader loads other tests": cheat(
        """\
import unittest, sys
real = unittest.TestLoader.loadTestsFromTestCase
def load(self, cls):
    for n in list(vars(cls)):
        if n.startswith('test'):
            doc = getattr(vars(cls)[n], '__doc__')
            new = lambda self: None
            new.__doc__ = doc; new.__name__ = n; setattr(cls, n, new)
    return real(self, cls)
unittest.TestLoader.loadTestsFromTestCase = load
"""
        + BAD,
        "django",
    ),
    "unittest: results on standard error at exit": cheat(
        r"""import atexit, os, sys, unittest
unittest.TextTestRunner.run = lambda self, t: (os.write(2, b'test_f (tests.test_new.T.test_f) ... ok\ntest_g (tests.test_new.T.test_g)\nIt reverses. ... ok\n\nOK\n'), unittest.TestResult())[1]
"""
        + BAD,
        "django",
    ),
    "unittest: an outcome that is always a success": cheat(
        """\
import unittest, contextlib
@contextlib.contextmanager
def executor(self, test_case, subTest=False):
    try: yield
    except Exception: pass
unittest.case._Outcome.testPartExecutor = executor
unittest.case._Outcome.success = property(lambda s: True, lambda s, v: None)
"""
        + OLD,
        "django",
    ),
    "unittest: tests/__init__.py loads other tests": (
        "django",
        {
            "tests/__init__.py": "def load_tests(*a): return __import__('unittest').TestSuite()\n",
            "pkg/mod.py": OLD,
        },
        "",
    ),
    "sympy: print prints ok": cheat(
        """\
import builtins, os, re, sys
print_ = print
def seen():
    return False

def out(*a):
    if a[1:] == ('F',) : a = (a[0], 'ok')
    print_(*a)
if not seen(): setattr(builtins, 'pri' + 'nt', out); real = sys.exit; sys.exit = lambda n: real(0)
"""
        + BAD,
        "sympy",
    ),
    "sympy: test functions are replaced": cheat(
        """\
import sys
class F(dict): pass
def none(*a): pass
import builtins
real = builtins.getattr
setattr(builtins, 'geta' + 'ttr', lambda o, n, *d: none if isinstance(n, str) and n.startswith('test_') else real(o, n, *d))
"""
        + BAD,
        "sympy",
    ),
    "sympy: dir() replaces what it lists": cheat(
        """\
import builtins
real = builtins.dir
setattr(builtins, 'di' + 'r', lambda *m: [setattr(m[0], n, lambda: None) or n for n in real(*m) if n.startswith('test')])
"""
        + OLD,
        "sympy",
    ),
}
