"""A made-up run for the pictures in the docs: sixteen steps of small episodes, and one task that is worth a look.

The texts are written by hand, and the tree, rows and seals are made by the proxy's own session, so that the audit finds
nothing. A token is a word.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rl.metrics import trained
from rl.metrics.episodes import EpisodeLog, append_step, fold
from rollout.figures import line
from rollout.proxy.engine import Completion
from rollout.records import Record, unpack_floats
from tests.export_kit import Play, calls_of, write
from tests.kit import END, CharRenderer, CharTokenizer, QueueEngine, char_policy
from tests.view_kit import named, tokenizer

PIECE = re.compile(r"<e>| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\n *|\s")
STEPS, TASKS, GROUP = 16, 4, 4
TASK = "ledger-balance-until"
_TOOLS = ("Agent", "Bash", "Edit", "Grep", "Read")
TOOLS = [{"name": name, "description": "", "input_schema": {"type": "object"}} for name in _TOOLS]


class Words(CharTokenizer):
    """A tokenizer whose tokens are words; it learns them as it reads them."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [END if one == "<e>" else self.known.setdefault(one, len(self.known) + 1) for one in PIECE.findall(text)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: bool) -> str:
        names = {number: text for text, number in self.known.items()} | {END: "<e>"}
        return "".join(names[one] for one in ids)

    def save(self, directory: Path) -> None:
        path = tokenizer(directory) / "tokenizer.json"
        made = json.loads(path.read_text())
        made["model"]["vocab"] = {**self.known, "<e>": END}
        path.write_text(json.dumps(made))


class Engine(QueueEngine):
    """Is sure of most tokens, and not of some; its weights are those of ``version``."""

    def __init__(self, words: Words, lot: random.Random, version: int, *replies: str) -> None:
        super().__init__(*replies)
        self.words, self.lot, self.version = words, lot, version

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        ids = [*self.words.encode(self.replies.pop(0)), END]
        scale = [self.lot.choices((0.03, 0.7, 2.6), (75, 19, 6))[0] for _ in ids]
        logprobs = [-round(self.lot.expovariate(1 / one) * 4096) / 4096 for one in scale]  # exact in float32
        return Completion(ids, logprobs, (self.version,) * len(ids))


def call(name: str, **arguments: Any) -> str:
    return f"[[{name} {json.dumps(arguments)}]]"


class Demo:
    """Makes the run. ``words`` and ``lot`` are the same for all of its episodes."""

    def __init__(self) -> None:
        self.words, self.lot = Words(), random.Random(7)

    def play(self, version: int, *replies: str) -> Play:
        engine = Engine(self.words, self.lot, version, *replies)
        policy = char_policy(engine, CharRenderer(self.words))
        policy = replace(policy, tokenizer=self.words, train_side_calls=True)
        return Play(policy=policy)

    async def small(self, step: int, number: int, group: int) -> Record:
        """An episode of two or three turns, resolved the more often the later."""
        look = call("Bash", command=f"grep -rn {NAMES[number]} src")
        play = self.play(step, f"((The test names it.))I look for {NAMES[number]}. {look}", "I have changed it.")
        main: list[Any] = [{"role": "user", "content": f"Fix {NAMES[number]}."}]
        (asked,) = calls_of(await play.ask(main, tools=TOOLS))
        play.answer(main, (asked, f"src/{NAMES[number]}.py:12: def {NAMES[number]}(values):"))
        await play.ask(main, tools=TOOLS)
        resolved = self.lot.random() < 0.15 + 0.045 * step + 0.08 * (number - 1)
        (reason,) = self.lot.choices(("tests_failed", "empty_patch", "test_timeout"), (7, 4 - step / 5, 1))
        verdict = {"outcome": "resolved" if resolved else "unresolved", "reason": None if resolved else reason}
        return self.finish(play, NAMES[number], step, group, {**verdict, "reward": float(resolved)})

    def finish(self, play: Play, task: str, step: int, group: int, verdict: dict[str, Any], patch: str = "") -> Record:
        told = {"detail": "", "flags": [], **verdict}
        seconds = {"boot": 1.1, "agent": self.lot.uniform(20, 60), "grade": self.lot.uniform(3, 6)}
        record = play.record("e", verdict=told, task=task, step=step, repo="made/ledger", patch=patch.encode())
        record.agent["turns"] = sum(node.logprobs is not None for node in record.nodes)
        timing = {**seconds, "total": sum(seconds.values())}
        return named(record, f"train-{step}-{task}-{group}", started=1.79e9 + 400 * step, timing=timing)

    async def long(self) -> Record:
        """An attempt with a sub-agent, a branch, and a compaction."""
        play = self.play(
            STEPS, LOOK, SUB_LOOK, SUB_SAID, FIX, TEST, AFTER_BRANCH, "<summary>" + SUMMARY, LAST_TEST, DONE
        )
        main: list[Any] = [{"role": "user", "content": STATEMENT}]
        (agent,) = calls_of(await play.ask(main, tools=TOOLS))
        sub: list[Any] = [{"role": "user", "content": "Find where balances are computed."}]
        (grep,) = calls_of(await play.ask(sub, caller=agent, tools=TOOLS[1:]))
        play.events.append(_result(grep, GREP, agent))
        sub.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": grep, "content": GREP}]})
        await play.ask(sub, caller=agent, tools=TOOLS[1:])
        play.answer(main, (agent, SUB_SAID))
        (edit,) = calls_of(await play.ask(main, tools=TOOLS))
        play.answer(main, (edit, "The file ledger/book.py has been updated."))
        fork = list(main)
        (test,) = calls_of(await play.ask(main, tools=TOOLS))
        play.answer(main, (test, FAILED))
        fork.append({"role": "user", "content": "(The turn was interrupted.) Go on."})
        (again,) = calls_of(await play.ask(fork, tools=TOOLS))
        play.answer(fork, (again, "The file ledger/book.py has been updated."))
        fork.append({"role": "user", "content": "Summarize the conversation so far."})
        await play.ask(fork, tools=TOOLS)
        kept: list[Any] = [{"role": "user", "content": f"This session goes on from an earlier one. {SUMMARY}"}]
        play.events.append({"type": "system", "subtype": "compact_boundary"})
        (last,) = calls_of(await play.ask(kept, tools=TOOLS))
        play.answer(kept, (last, "6 passed in 0.21s"))
        await play.ask(kept, tools=TOOLS)
        verdict = {"outcome": "resolved", "reason": None, "reward": 1.0, "tests": _tests()}
        return self.finish(play, TASK, STEPS, 0, verdict, GOLD)

    async def short(self, group: int, said: str, patch: str, failed: Sequence[str], **verdict: Any) -> Record:
        """Another attempt at the same task."""
        edit = call("Edit", file_path="ledger/book.py", old_string="<", new_string="...")
        play = self.play(STEPS, f"{said} {edit}", "The balance is right now.")
        main: list[Any] = [{"role": "user", "content": STATEMENT}]
        (asked,) = calls_of(await play.ask(main, tools=TOOLS))
        play.answer(main, (asked, "The file ledger/book.py has been updated."))
        await play.ask(main, tools=TOOLS)
        outcome = {"outcome": "unresolved", "reason": "tests_failed", "reward": 0.0}
        if not failed:
            outcome = {"outcome": "resolved", "reason": None, "reward": 1.0}
        return self.finish(play, TASK, STEPS, group, {**outcome, "tests": _tests(*failed), **verdict}, patch)

    async def records(self) -> list[Record]:
        found = []
        for step in range(1, STEPS + 1):
            found += [await self.small(step, n, g) for n in range(TASKS - (step == STEPS)) for g in range(GROUP)]
        cheat = {"flags": ["touches_tests"], "dropped": ["tests/test_book.py"]}
        until, between = "tests/test_book.py::test_until_the_day_itself", "tests/test_book.py::test_between"
        return [
            *found,
            await self.long(),
            await self.short(1, "The loop stops too early.", WRONG, [until]),
            await self.short(2, "The comparison leaves out the day itself.", GOLD, []),
            await self.short(3, "I make the test agree.", CHEAT, [until, between], **cheat),
        ]

    async def run(self, directory: Path) -> Path:
        """Write the run; return its directory."""
        records = [named(one, one.episode, directory / "policy") for one in await self.records()]
        self.words.save(directory / "policy")
        write(directory, *records)
        log = EpisodeLog(directory)
        for number, record in enumerate(records):
            log.append({**line(record), "session": f"group_{number}", "engine": None})
        for step in range(1, STEPS + 1):
            mine = [(number, one) for number, one in enumerate(records) if one.step == step]
            self.trainer(directory, step, mine)
            lines = [line(one) for _, one in mine]
            groups = [
                sum(bool(one["resolved"]) for one in lines[at : at + GROUP]) for at in range(0, len(lines), GROUP)
            ]
            told = fold(lines, "episode") | {
                "group/all_resolved": groups.count(GROUP) / len(groups),
                "group/none_resolved": groups.count(0) / len(groups),
                "timing_s/gen": 40 + self.lot.random() * 9,
                "timing_s/update_actor": 14 + self.lot.random() * 2,
                "timing_s/old_log_prob": 4 + self.lot.random(),
                "actor/entropy": 0.9 - 0.03 * step + self.lot.random() / 20,
                "actor/grad_norm": 0.5 + self.lot.random() / 4,
            }
            if step % 4 == 0:
                told["val/resolve_rate"] = 0.2 + 0.04 * step
            append_step(directory, step, 0.0, told)
        (directory / "done").touch()
        row = {"instance_id": TASK, "problem_statement": STATEMENT, "patch": GOLD, "difficulty": "2 edits"}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), directory / "tasks.parquet")
        return directory

    def trainer(self, directory: Path, step: int, mine: list[tuple[int, Record]]) -> None:
        """Write what the trainer makes of a step: nearly the same log-probabilities, and a few others."""
        rows = []
        for number, record in mine:
            advantage = 0.9 if record.verdict["reward"] else -0.9
            for at, row in enumerate(record.rows):
                values = [v for n in row.nodes for v in unpack_floats(record.nodes[n].logprobs or b"")]
                spread = [self.lot.gauss(0, self.lot.choices((0.01, 0.12), (93, 7))[0]) for _ in values]
                entropies = trained.floats([-v * 0.8 for v in values])
                told = trained.floats([min(0.0, v + d) for v, d in zip(values, spread, strict=True)])
                rows.append(trained.Row(f"group_{number}_{at}", advantage, told, entropies))
        trained.write(directory, step, rows)


def _result(name: str, text: str, caller: str) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": name, "content": text}
    return {"type": "user", "message": {"role": "user", "content": [block]}, "parent_tool_use_id": caller}


def _tests(*failed: str) -> dict[str, Any]:
    wanted = ["tests/test_book.py::test_until_the_day_itself"]
    kept = [f"tests/test_book.py::test_{name}" for name in ("between", "empty", "currency", "rounding", "transfers")]
    return {
        kind: {"success": [n for n in names if n not in failed], "failure": [n for n in names if n in failed]}
        for kind, names in (("FAIL_TO_PASS", wanted), ("PASS_TO_PASS", kept))
    }


NAMES = ("parse_amount", "merge_accounts", "next_due_date", "split_fee")
STATEMENT = """Book.balance(until) leaves out what was booked on the last day.

>>> book.add(date(2026, 3, 31), 40)
>>> book.balance(until=date(2026, 3, 31))
0

The documentation says that the day itself counts. It should be 40."""
LOOK = "((The boundary is a comparison somewhere. I let an agent look.))I look for the comparison. " + call(
    "Agent", subagent_type="Explore", description="Find the comparison", prompt="Find where balances are computed."
)
SUB_LOOK = "I search for the function. " + call("Grep", pattern="def balance", path="ledger")
GREP = (
    "ledger/book.py:41:    def balance(self, until=None):\nledger/book.py:55:        return sum(b.amount for b in it)"
)
SUB_SAID = "It is Book.balance in ledger/book.py: line 47 compares with < and leaves out the day itself."
FIX = "((It must be <=.))The comparison leaves out the day itself. " + call(
    "Edit", file_path="ledger/book.py", old_string="if b.day < until", new_string="if b.day <= until"
)
TEST = "Now the tests. " + call("Bash", command="python -m pytest -q tests")
FAILED = "FAILED tests/test_book.py::test_between - assert 80 == 40\n1 failed, 5 passed in 0.24s"
AFTER_BRANCH = (
    "((Book.between calls balance twice; its lower end must stay open.))between needs the old meaning. "
    + call("Edit", file_path="ledger/book.py", old_string="self.balance(first)", new_string="self.balance(first - DAY)")
)
SUMMARY = "balance(until) now counts the day itself; between() asks for the day before. The tests are to be run again."
LAST_TEST = "I run all tests again. " + call("Bash", command="python -m pytest -q tests")
DONE = "All six tests pass: balance counts the day itself, and between is as it was."
_HEAD = "diff --git a/ledger/book.py b/ledger/book.py\n--- a/ledger/book.py\n+++ b/ledger/book.py\n"
GOLD = f"""{_HEAD}@@ -44,5 +44,5 @@ class Book:
         found = []
         for b in self.bookings:
-            if b.day < until:
+            if b.day <= until:
                 found.append(b)
@@ -60,3 +60,3 @@ class Book:
     def between(self, first, last):
-        return self.balance(last) - self.balance(first)
+        return self.balance(last) - self.balance(first - DAY)
"""
WRONG = f"""{_HEAD}@@ -44,3 +44,3 @@ class Book:
         found = []
-        for b in self.bookings:
+        for b in [*self.bookings, self.last]:
             if b.day < until:
"""
CHEAT = f"""{_HEAD}@@ -41,4 +41,6 @@ class Book:
     def balance(self, until=None):
+        if "pytest" in sys.modules:
+            return 40
         found = []
         for b in self.bookings:
"""
