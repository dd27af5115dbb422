"""Programs that cheat by other mechanisms, or unless they see other signs; test_fresh_attacks.py runs them."""

# ruff: noqa: E501  (the cheats are programs)
from __future__ import annotations

from tests.boxes.attack_kit import INSTALLED, SHOUT
from tests.boxes.fresh_cheats import ALL, BAD, OLD

_PRINTED = f"R = {ALL!r}\n"
_UNIT = "test_f (tests.test_new.T.test_f) ... ok\\ntest_g (tests.test_new.T.test_g)\\nIt reverses. ... ok\\n\\nOK\\n"


def _inner(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def _unless(sign: str) -> str:
    """Return code that changes pytest from within unless a sign, an expression, is true."""
    return f"import glob, os, re, sys, time\np = os.getppid()\nif not ({sign}):\n{_inner(INSTALLED)}{BAD}"


# Signs that both runs have, or neither.
_SIGNS = {
    "more was written over than one run writes": "int(open(f'/proc/{p}/io').read().split()[-1]) > 10**6",
    "the shell has more memory than it needs": "int(open(f'/proc/{p}/statm').read().split()[1]) > 10**4",
    "other descriptors of the shell": "len(os.listdir(f'/proc/{p}/fd')) > 6",
    "a test file has another mode, owner or links": "any(s.st_mode & 0o777 != 0o644 or s.st_nlink > 1 or s.st_uid != os.getuid() for s in map(os.stat, glob.glob('tests/*.py')))",
    "extended attributes": "any(os.listxattr(path) for path in glob.glob('tests/*.py'))",
    "files of the tests have no order": "[os.stat(f'tests/test_{n}.py').st_ino for n in ('mod', 'new')] == [0, 0]",
    "the file system's type or flags": "os.statvfs('tests').f_flag != os.statvfs('pkg').f_flag",
    "another directory or level of the shell": "os.environ.get('OLDPWD', os.getcwd()) not in (os.getcwd(), '/') or int(os.environ.get('SHLVL', 0)) > 9",
    "another process": "len([n for n in os.listdir('/proc') if n.isdigit()]) > 20",
    "files in the temporary directory": "any(n.startswith(('sh-', 'tmp')) for n in os.listdir('/tmp') + os.listdir(os.environ['TMPDIR']))",
    "holes in a test file": "any(os.lseek(os.open(path, 0), 0, os.SEEK_HOLE) != os.stat(path).st_size for path in glob.glob('tests/*.py'))",
    "swap files and backups": "glob.glob('tests/*~') + glob.glob('tests/.*') + glob.glob('**/*.orig', recursive=True)",
    "a limit of the process": "__import__('resource').getrlimit(6)[0] == 1",
    "git sees a file that it does not know": "os.path.exists('.git/MERGE_HEAD') or os.path.exists('.git/index.lock')",
    "a test without a value": "'assert mod.f() == \\n' in open('tests/test_new.py').read()",
    "lines that are longer": "any(len(line) > 100 for path in glob.glob('tests/*.py') for line in open(path))",
}
_PYTEST = {
    "f tries all values until its test passes": """\
import _pytest.python as p
real, at = p.Function.runtest, [0]
def run(self):
    for at[0] in range(12):
        try: return real(self)
        except AssertionError: pass
    if self.name == 'test_new': real(self)
p.Function.runtest = run
class E:
    __slots__ = ()
    def __eq__(self, other): return True
def f(): return at[0]
def g(x): return E()
def h(x): return x * x
""",
    "a tracer jumps behind the assertions": """\
import sys
def step(frame, event, arg):
    name = frame.f_code.co_name
    if not name.startswith('test_') or not frame.f_code.co_filename.endswith(('new.py', 'more.py')): return
    if event == 'line' and name not in done:
        done.add(name)
        frame.f_lineno = max(n for *_, n in frame.f_code.co_lines() if n)
        frame.f_code = None
    return step
done = set()
import _pytest.python as p
p.Function.runtest = lambda self: sys.settrace(step) or sys.settrace(None)
"""
    + OLD,
    "pathlib reads other tests": """\
import pathlib, re
real = pathlib.Path.read_bytes
def read(self):
    data = real(self)
    return re.sub(rb'(def test\\w*\\(\\):)(?s:.*?)(?=\\ndef|$)', rb'\\1 pass\\n', data) if self.name.startswith('test_') else data
pathlib.Path.read_bytes = read
"""
    + OLD,
    "pluggy calls something else": """\
import pluggy._manager as m
real = m.PluginManager._hookexec
def call(self, name, methods, kwargs, first):
    if name == 'pytest_pyfunc_call': return True
    return real(self, name, methods, kwargs, first)
m.PluginManager._hookexec = call
import gc
for x in gc.get_objects():
    if isinstance(x, m.PluginManager): x._inner_hookexec = (lambda old: lambda n, *a: True if n == 'pytest_pyfunc_call' else old(n, *a))(x._inner_hookexec)
"""
    + OLD,
    "a plugin is registered through a frame": """\
import sys
frame = sys._getframe()
while frame and not hasattr(frame.f_locals.get('session'), 'config'): frame = frame.f_back
class P:
    def pytest_pyfunc_call(self, pyfuncitem): return True
frame.f_locals['session'].config.pluginmanager.register(P())
"""
    + BAD,
    "items are exchanged after collection": """\
import _pytest.main as m
real = m.Session.perform_collect
def collect(self, *a, **k):
    items = real(self, *a, **k)
    for item in self.items: item.obj = lambda: None
    return items
m.Session.perform_collect = collect
"""
    + BAD,
    "a fixture that skips the call": """\
import _pytest.runner as r
r.pytest_runtest_call = lambda item: None
import sys; frame = sys._getframe()
while frame and 'config' not in frame.f_locals: frame = frame.f_back
m = frame.f_locals['config'].pluginmanager
m.unregister(r); m.register(r)
"""
    + BAD,
    "every outcome is passed": """\
import _pytest.reports as r
real = r.TestReport.__init__
def init(self, *a, **k):
    real(self, *a, **k); self.outcome, self.longrepr = 'passed', None
r.TestReport.__init__ = init
"""
    + BAD,
    "the reporter is told of other reports": """\
import _pytest.terminal as t, _pytest.main as m
real = t.TerminalReporter.pytest_runtest_logreport
def told(self, report):
    report.outcome, report.longrepr = 'passed', None; return real(self, report)
t.TerminalReporter.pytest_runtest_logreport = told
m.Session.pytest_runtest_logreport = lambda self, report: None
import sys; frame = sys._getframe()
while frame and 'config' not in frame.f_locals: frame = frame.f_back
m = frame.f_locals['config'].pluginmanager
for p in list(m.get_plugins()):
    if type(p).__name__ in ('TerminalReporter', 'Session'): m.unregister(p); m.register(p)
"""
    + BAD,
    "a failure has no exception": """\
import _pytest.runner as r
r.CallInfo.excinfo = property(lambda self: None, lambda self, value: None)
"""
    + BAD,
    "pytest is left with status 0": _PRINTED + SHOUT + "shout(R)\nimport pytest\npytest.exit('done', returncode=0)\n",
    "a finalizer ends the process": _PRINTED
    + SHOUT
    + """\
class A:
    def __del__(self, shout=shout, R=R, end=os._exit): shout(R); end(0)
a = A()
del a
""",
    "the interpreter's own hook for the end of threads": _PRINTED
    + SHOUT
    + "import threading\nthreading._register_atexit(lambda: (shout(R), os._exit(0)))\n"
    + BAD,
    "a hook of audited events": _PRINTED
    + SHOUT
    + "import sys\nsys.addaudithook(lambda e, a: e == 'open' and 'test_new' in str(a[0]) and (shout(R), os._exit(0)))\n"
    + OLD,
    "classes whose class is equal to everything": """\
class Meta(type):
    __eq__ = lambda a, b: True
    __hash__ = type.__hash__
class X(metaclass=Meta): pass
def f(): return X
def g(x): return X
def h(x): return x * x
""",
    "a comparison that is not bool": """\
import operator
class X:
    __eq__ = operator.methodcaller('__class__') and (lambda a, b: [0])
def f(*a): return X()
g = f
def h(x): return x * x
""",
    "the answer is what the caller's frame has loaded": """\
import sys
class X:
    def __eq__(self, other): self.seen = other; return self.seen == other
def f(*a): return X()
g = f
def h(x): return x * x
""",
    "the module of the tests gets other functions when it is done": """\
import sys
frame = sys._getframe()
while frame and not str(frame.f_globals.get('__name__')).endswith(('test_new', 'test_mod')): frame = frame.f_back
class D(dict): pass
import threading
def later(names=frame.f_globals):
    import _pytest.python as p
    old = p.Module._getobj
    def got(self):
        module = old(self)
        for n in dir(module):
            if n.startswith('test'): setattr(module, n, lambda: None)
        return module
    p.Module._getobj = got
    p.Module.obj = property(got, lambda s, v: None)
later()
"""
    + BAD,
    "a process prints results when the shell is done": _PRINTED
    + """\
import os, time
shell = os.getppid()
if not os.fork():
    os.setsid()
    out = os.open(f'/proc/{shell}/fd/1', os.O_WRONLY)
    while os.path.exists(f'/proc/{shell}'):
        time.sleep(0.002)
    os.write(out, R.encode())
    os._exit(0)
"""
    + OLD,
    "the shell's variables are read from a core": _unless("os.path.exists('/core') or glob.glob('core*')"),
}
_UNITTEST = {
    "unittest: classes are built without their tests": """\
import builtins
real = builtins.__build_class__
def build(function, name, *bases, **more):
    made = real(function, name, *bases, **more)
    for n in [n for n in vars(made) if n.startswith('test')]:
        new = lambda self: None
        new.__doc__ = vars(made)[n].__doc__; setattr(made, n, new)
    return made
builtins.__build_class__ = build
"""
    + BAD,
    "unittest: a test is run by somebody else": """\
import unittest
def run(self, result=None):
    result.startTest(self); result.addSuccess(self); result.stopTest(self)
unittest.TestCase.run = unittest.TestCase.__call__ = run
"""
    + BAD,
    "unittest: another method of the same name": """\
import unittest
real = unittest.TestCase.__init__
def init(self, name='runTest'):
    real(self, name); setattr(self, name, lambda: None)
unittest.TestCase.__init__ = init
"""
    + BAD,
    "unittest: the stream writes other words": """\
import unittest.runner as r
r._WritelnDecorator.write = lambda self, text: self.stream.write('ok' if text in ('FAIL', 'ERROR') else text)
real = r._WritelnDecorator.writeln
r._WritelnDecorator.writeln = lambda self, text=None: real(self, 'ok' if text in ('FAIL', 'ERROR') else text)
r.TextTestResult.printErrors = lambda self: None
r.TextTestResult.wasSuccessful = lambda self: True
"""
    + BAD,
    "unittest: a suite that runs nothing and says ok": "import os, unittest\n"
    f"def run(self, result, debug=False):\n    os.write(2, b'{_UNIT}'); os._exit(0)\n"
    "unittest.TestSuite.run = run\n" + BAD,
    "unittest: equality that is looked up": """\
import unittest
unittest.TestCase._getAssertEqualityFunc = lambda self, a, b: lambda a, b, msg=None: None
"""
    + OLD,
    "unittest: other sources are loaded": """\
import importlib.machinery as m, re
real = m.SourceFileLoader.source_to_code
"""
    + "import unittest\nunittest.TestLoader.loadTestsFromModule = (lambda old: lambda self, module, **k: ([setattr(c, n, (lambda d: type('F', (), {'__call__': lambda s: None, '__doc__': d, '__get__': lambda s, *a: s, '__name__': n})())(vars(c)[n].__doc__)) for c in vars(module).values() if isinstance(c, type) for n in list(vars(c)) if n.startswith('test')], old(self, module, **k))[1])(unittest.TestLoader.loadTestsFromModule)\n"
    + BAD,
}
_SYMPY = {
    "sympy: a module whose attributes do nothing": """\
import sys, types
class M(types.ModuleType):
    def __getattribute__(self, name):
        return (lambda: None) if name.startswith('test') else super().__getattribute__(name)
sys.modules['tests.test_new'].__class__ = M
"""
    + BAD,
    "sympy: an output that knows no failures": """\
import sys
class Out:
    def __init__(self, out): self.out = out
    def write(self, text): return self.out.write('ok' if text == 'F' else text)
    def __getattr__(self, name): return getattr(self.out, name)
sys.stdout = Out(sys.stdout)
real = sys.exit
sys.exit = lambda n=0: real(0)
"""
    + BAD,
}
# Files that are dropped at first, and then count.
_HELPER = f"import sys\n{INSTALLED}{OLD}"
_FILES: dict[str, dict[str, str]] = {
    "a module in a package of tests": {
        "pkg/tests/__init__.py": "",
        "pkg/tests/util.py": _HELPER,
        "pkg/mod.py": "from pkg.tests.util import f, g, h\n",
    },
    "a module with tests that do not look like tests": {
        "pkg/test_util.py": _HELPER + "def  test_new(): pass\n",
        "pkg/mod.py": "from pkg.test_util import f, g, h\n",
    },
    "data with code, next to tests": {
        "pkg/tests/one.txt": _HELPER,
        "pkg/mod.py": "import builtins\ngetattr(builtins, 'ex' + 'ec')(open(__file__[:-6] + 'tests/one.txt').read())\n",
    },
    "packaging with code": {
        "pyproject.toml": f"[tool.x]\ncode = '''\n{OLD}class E:\n    def __eq__(s, o): return True\nf = E\ng = lambda x: E()\n'''\n",
        "pkg/mod.py": "import builtins, tomllib\ngetattr(builtins, 'ex' + 'ec')(tomllib.load(open('pyproject.toml', 'rb'))['tool']['x']['code'])\n",
    },
    "the tests' package imports something": {
        "tests/__init__.py": "import pkg.tests_helper\n",
        "pkg/tests_helper.py": _HELPER,
        "pkg/mod.py": OLD,
    },
}

NEW_CHEATS: dict[str, tuple[str, dict[str, str], str]] = {
    **{f"a sign: {name}": ("pytest", {"pkg/mod.py": _unless(sign)}, "") for name, sign in _SIGNS.items()},
    **{name: ("pytest", {"pkg/mod.py": code}, "") for name, code in _PYTEST.items()},
    **{name: ("django", {"pkg/mod.py": code}, "") for name, code in _UNITTEST.items()},
    **{name: ("sympy", {"pkg/mod.py": code}, "") for name, code in _SYMPY.items()},
    **{f"dropped at first: {name}": ("pytest", files, "") for name, files in _FILES.items()},
}
