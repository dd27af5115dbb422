"""This plugin of pytest writes down what tests do: which lines each one runs, how it fails, what functions return.

It runs in a box, in the tested process, and imports nothing of this project. `rl.data.make.runs` puts it there with a
plan (`plan.json` in TMPDIR) and reads what it has written (`result.json`), which is hostile input.
"""

from __future__ import annotations

import ast
import json
import os
import sys

import pytest

_PLACE = os.environ.get("TMPDIR", "/tmp")
_LONGEST = 2000  # characters of a message, and of a value
_MOST_VALUES = 40
_MOST_CALLS, _LONGEST_CALL = 60, 160


def _text(value):
    try:
        return repr(value)[:_LONGEST]
    except Exception as error:
        return f"<{type(error).__name__} in repr>"


class Calls:
    """A Calls notes calls of some functions and what they return, if all arguments and the result are plain values."""

    def __init__(self, root, names):
        self.names = {root + path: set(functions) for path, functions in names.items()}
        self.root = root
        self.seen = {}  # (path, function) -> call -> result
        self.open = {}  # frame -> call

    def __call__(self, frame, event, value):
        """Note a call or a return; this is a profile function."""
        code = frame.f_code
        if event not in ("call", "return") or code.co_qualname not in self.names.get(code.co_filename, ()):
            return
        if event == "call":
            calls = self.seen.setdefault((code.co_filename[len(self.root) :], code.co_qualname), {})
            text = _call(code, frame.f_locals) if len(calls) < _MOST_CALLS else None
            if text is not None and text not in calls:
                self.open[frame] = text
        elif (text := self.open.pop(frame, None)) is not None:
            # A function that raises returns None here, too.
            said = _plain(value) if value is not None else None
            if said is not None:
                self.seen[code.co_filename[len(self.root) :], code.co_qualname][text] = said

    def found(self):
        """Return [path, function, call, result] of each call."""
        return [[*key, call, said] for key, calls in self.seen.items() for call, said in calls.items()]


def _call(code, names):
    """Return the call that a frame begins with, as source; None if it has arguments that are no plain values."""
    count, keywords = code.co_argcount, code.co_kwonlyargcount
    given = [names[name] for name in code.co_varnames[:count]]
    named = {name: names[name] for name in code.co_varnames[count : count + keywords]}
    rest = code.co_varnames[count + keywords :]
    if code.co_flags & 4:
        given += names[rest[0]]
        rest = rest[1:]
    if code.co_flags & 8:
        named.update(names[rest[0]])
    texts = [_plain(value) for value in given] + [_plain(value) for value in named.values()]
    if None in texts:
        return None
    texts[len(given) :] = [f"{name}={text}" for name, text in zip(named, texts[len(given) :], strict=True)]
    text = f"{code.co_name}({', '.join(texts)})"
    return text if len(text) <= _LONGEST_CALL else None


def _plain(value):
    """Return a value's source, None if it is not a plain one."""
    if type(value) not in (bool, int, float, str, bytes, list, tuple, dict, type(None)):
        return None
    text = _text(value)
    try:
        same = len(text) <= _LONGEST_CALL and ast.literal_eval(text) == value
    except Exception:
        return None
    return text if same is True else None


class OutcomeRecorder:
    """A recorder holds what the tests of one run did."""

    def __init__(self, root):
        self.root = str(root) + os.sep
        with open(os.path.join(_PLACE, "plan.json")) as file:
            plan = json.load(file)
        self.only = None if plan["only"] is None else set(plan["only"])
        self.tests, self.failures, self.broken = {}, [], []
        self.reasons = {}  # why a test did not pass
        self.calls = Calls(self.root, plan["calls"]) if plan["calls"] else None
        self.coverage = None
        if plan["sources"]:
            import coverage

            self.sources = plan["sources"]
            self.coverage = coverage.Coverage(
                data_file=None, include=[self.root + path for path in self.sources], config_file=False
            )
            self.coverage.start()

    def pytest_collection_modifyitems(self, config, items):
        """Leave only the tests of the plan."""
        if self.only is not None:
            kept = [item for item in items if item.nodeid in self.only]
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.only])
            items[:] = kept

    def pytest_collectreport(self, report):
        """Note what cannot be collected."""
        if report.failed:
            self.broken.append([report.nodeid, str(report.longrepr)[-_LONGEST:]])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Tell coverage.py which test begins and ends."""
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        sys.setprofile(self.calls)
        yield
        sys.setprofile(None)
        if self.coverage is not None:
            self.coverage.switch_context("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Note a test's outcome, and how it failed."""
        report = (yield).get_result()
        before = self.tests.get(item.nodeid)
        if report.failed:
            self.tests[item.nodeid] = "failed"
            fixture = getattr(call.excinfo and call.excinfo.value, "argname", None)
            said = call.excinfo.exconly() if call.excinfo else "failed"
            self.reasons.setdefault(item.nodeid, f"no fixture {fixture}" if fixture else said)
            if before != "failed" and call.excinfo is not None:
                self.failures.append(self._failure(item, report, call.excinfo))
        elif report.when == "call" and before is None:
            plain = report.passed and not hasattr(report, "wasxfail")
            self.tests[item.nodeid] = "passed" if plain else "other"
        if report.skipped:
            self.tests.setdefault(item.nodeid, "other")
            why = getattr(report, "wasxfail", report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
            self.reasons[item.nodeid] = f"skipped: {why}"

    def _failure(self, item, report, excinfo):
        frames, values = [], {}
        test_file = str(item.path)
        for entry in excinfo.traceback:
            path = str(entry.path)
            if not path.startswith(self.root):
                continue
            frames.append([path[len(self.root) :], entry.lineno + 1, entry.name])
            if path == test_file:
                values = {}
                for name, value in list(entry.frame.f_locals.items())[:_MOST_VALUES]:
                    text = _text(value)
                    try:
                        ast.literal_eval(text)
                    except Exception:
                        continue
                    values[name] = text
        kind = excinfo.type
        return {
            "test": item.nodeid,
            "when": report.when,
            "type": kind.__name__,
            "message": str(excinfo.value)[:_LONGEST],
            "frames": frames[:3] + frames[3:][-12:],
            "values": values,
        }

    def lines(self):
        """Return, for each source, the tests that run each line: bits, in hexadecimal digits, by line."""
        if self.coverage is None:
            return {}
        self.coverage.stop()
        data = self.coverage.get_data()
        numbers = {test: number for number, test in enumerate(self.tests)}
        found = {}
        for path in self.sources:
            lines = {}
            for line, contexts in data.contexts_by_lineno(self.root + path).items():
                bits = sum(1 << numbers[test] for test in set(contexts) if test in numbers)
                if bits:
                    lines[line] = f"{bits:x}"
            found[path] = lines
        return found

    def pytest_sessionfinish(self, session, exitstatus):
        """Write what was found."""
        result = {
            "tests": self.tests,
            "failures": self.failures[:40],
            "reasons": {test: why.split("\n")[0][:200] for test, why in self.reasons.items()},
            "broken": self.broken[:40],
            "lines": self.lines(),
            "calls": self.calls.found() if self.calls else [],
        }
        with open(os.path.join(_PLACE, "result.json"), "w") as file:
            json.dump(result, file)


def pytest_configure(config):
    """Put a recorder into pytest."""
    config.pluginmanager.register(OutcomeRecorder(config.rootpath), "code-rl-recorder")
    config.addinivalue_line("python_files", "tests.py")  # of small packages; pytest does not look for it
    sys.dont_write_bytecode = True
