"""This plugin of pytest writes down what tests do: which lines each one runs, and how it fails.

It runs in a box, in the tested process, and imports nothing of this project. `rl.make.runs` puts it there with a plan
(`plan.json` in TMPDIR) and reads what it has written (`result.json`), which is hostile input.
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


def _plan():
    with open(os.path.join(_PLACE, "plan.json")) as file:
        return json.load(file)


def _text(value):
    try:
        return repr(value)[:_LONGEST]
    except Exception as error:
        return f"<{type(error).__name__} in repr>"


class Recorder:
    """A recorder holds what the tests of one run did."""

    def __init__(self, root):
        self.root = str(root) + os.sep
        plan = _plan()
        self.only = None if plan.get("only") is None else set(plan["only"])
        self.tests, self.failures, self.broken, self.compared = {}, [], [], None
        self.coverage = None
        if plan.get("sources"):
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
        self.compared = None
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        yield
        if self.coverage is not None:
            self.coverage.switch_context("")

    def pytest_assertrepr_compare(self, op, left, right):
        """Note the two sides of a failed comparison."""
        self.compared = [op, _text(left), _text(right)]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Note a test's outcome, and how it failed."""
        report = (yield).get_result()
        before = self.tests.get(item.nodeid)
        if report.failed:
            self.tests[item.nodeid] = "failed"
            if before != "failed" and call.excinfo is not None:
                self.failures.append(self._failure(item, report, call.excinfo))
        elif report.when == "call" and before is None:
            plain = report.passed and not hasattr(report, "wasxfail")
            self.tests[item.nodeid] = "passed" if plain else "other"

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
            "compared": self.compared,
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
            "exit": int(exitstatus),
            "tests": self.tests,
            "failures": self.failures[:40],
            "broken": self.broken[:40],
            "lines": self.lines(),
        }
        with open(os.path.join(_PLACE, "result.json"), "w") as file:
            json.dump(result, file)


def pytest_configure(config):
    """Put a recorder into pytest."""
    config.pluginmanager.register(Recorder(config.rootpath), "code-rl-recorder")
    sys.dont_write_bytecode = True
