"""This module has runs to look at, for tests of the viewer: small ones of every kind of episode, and one of hostile
text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rl.metrics import trained
from rl.metrics.episodes import EpisodeLog, append_step
from rl.view.library import Library
from rl.view.server import application
from rollout.figures import line
from rollout.records import Record, unpack_floats
from tests import plant
from tests.audit_kit import played
from tests.export_kit import Play, calls_of, crowd, nested, repair, without_words, write
from tests.kit import END

HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>\x1b[31mred\x1b[0m\x1b]8;;http://x\x07"
    "\u202egnp.exe\u202c\u200b{{ 7 * 7 }} javascript:alert(1) \x00\x07 </pre></details></article><style>*{display:none}"
)


def tokenizer(directory: Path) -> Path:
    """Write a tokenizer.json whose ids are those of the kit: a token is a character."""
    # By hand: the library would list the numbers that no token has, a million of them, on the screen.
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    made = {
        "version": "1.0",
        "added_tokens": [{"id": END, "content": "<e>", **plain}],
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {**{chr(i): i for i in range(1, 0x2100)}, "<e>": END},
            "unk_token": "<e>",
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(made))
    return directory


def bytewise(directory: Path, *longer: str) -> Path:
    """Write a byte-level tokenizer.json whose first 256 ids are bytes, as they are; then come ``longer`` pieces."""
    made = json.loads((tokenizer(directory) / "tokenizer.json").read_text())
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    pieces = [chr(one if one in plain else 256 + next(others)) for one in range(256)]
    made["model"] = {"type": "BPE", "vocab": {one: at for at, one in enumerate([*pieces, *longer])}, "merges": []}
    made["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (directory / "tokenizer.json").write_text(json.dumps(made))
    return directory


def named(record: Record, name: str, model: Path | str = "m", **changes: Any) -> Record:
    return msgspec.structs.replace(record, episode=name, model=str(model), **changes)


async def run(directory: Path) -> Path:
    """Write a run of two steps: two groups, a sub-agent and a compaction, a hosted episode, one that was lost."""
    model = tokenizer(directory / "policy")
    good = await repair("train-1-fix-0", reward=1.0)
    bad = await repair("train-1-fix-1", reward=0.0, last="I give up.")
    kept = {"success": ["test_b"], "failure": []}
    tests = {"FAIL_TO_PASS": {"success": ["test_a"], "failure": []}, "PASS_TO_PASS": kept}
    failed = {**tests, "FAIL_TO_PASS": {"success": [], "failure": ["test_a"]}}
    found = {"flags": ["touches_tests"], "dropped": ["tests/x.py"], "log_tail": "boom"}
    flagged = {**bad.verdict, "tests": failed, **found}
    lost = {"outcome": "infra_failure", "reason": "boot_failed", "reward": None, "detail": "no box", "flags": []}
    records = [
        named(good, "train-1-fix-0", model, task="fix", verdict={**good.verdict, "tests": tests}, patch=PATCH),
        named(bad, "train-1-fix-1", model, task="fix", verdict=flagged),
        named(await crowd("train-1-crowd-0"), "train-1-crowd-0", model, task="crowd"),
        named(await played(), "train-1-crowd-1", model, task="crowd"),
        named(bad, "train-1-lost-0", model, task="fix", verdict=lost, rows=[], nodes=[], events=[], agent={}),
        named(await repair("train-2-fix-0"), "train-2-fix-0", model, task="fix", step=2),
        named(await nested("eval-1-hosted-0"), "eval-1-hosted-0", split="eval", task="hosted"),
    ]
    write(directory, *records)
    log = EpisodeLog(directory)
    for number, record in enumerate(records):
        log.append({**line(record), "session": f"group_{number}", "engine": None})
    for step in (1, 2):
        told = {"episode/resolve_rate": 0.5 * step, "episode/reward_mean": 0.4, "episode/turns": 2.0}
        told |= {"timing_s/gen": 3.0, "timing_s/update_actor": 1.0, "failure/tests_failed": 1.0}
        told["episode/resolved"] = 1.0
        append_step(directory, step, 0.0, told)
    keep_trainer(directory, records[0], "group_0", 0.5)
    (directory / "config.yaml").write_text("algorithm: {norm_adv_by_std_in_grpo: false}\n")
    return directory


async def planted(directory: Path) -> Path:
    """Write a run of two groups of which four episodes have a fault each, in their names."""
    model = tokenizer(directory / "policy")
    names = ["mask", "logprob", "agent", "hack", "sound", "sound-2", "sound-3", "sound-4"]
    records = []
    for name in names:
        made = await crowd(name) if name in ("agent", "sound") else await repair(name)
        task = "second" if name == "hack" or name[-1].isdigit() else "first"
        records.append(without_words(named(made, f"train-1-{name}-0", model, task=task, patch=PATCH)))
    mask, logprob, agent, hack, *_ = records
    plant.flip_mask(mask)
    keep_trainer(directory, logprob, "group_1", 0.5)
    plant.wrong_logprob(logprob)
    plant.lose_agent(agent)
    hack.patch = HACK
    write(directory, *records)
    log = EpisodeLog(directory)
    for number, record in enumerate(records):
        log.append({**line(record), "session": f"group_{number}", "engine": None})
    append_step(directory, 1, 0.0, {"episode/resolve_rate": 1.0})
    return directory


def keep_trainer(directory: Path, record: Record, session: str, advantage: float) -> None:
    """Write what a trainer would have made of an episode: each log-probability a tenth lower."""
    rows = []
    for number, row in enumerate(record.rows):
        values = [v - 0.1 for n in row.nodes for v in unpack_floats(record.nodes[n].logprobs or b"")]
        entropies = trained.floats([0.25] * len(values))
        rows.append(trained.Row(f"{session}_{number}", advantage, trained.floats(values), entropies))
    trained.write(directory, record.step, rows)


async def hostile(directory: Path, size: int = 10 << 20) -> Path:
    """Write a run whose episode is hostile wherever a policy, a tool or a task can put text."""
    play = Play(f'{HOSTILE} [[Bash {{"command": {json.dumps(HOSTILE)}}}]]', f"(({HOSTILE})){HOSTILE}")
    main: list[Any] = [{"role": "user", "content": HOSTILE}]
    (call,) = calls_of(await play.ask(main))
    play.answer(main, (call, HOSTILE), text=HOSTILE)
    await play.ask(main)
    verdict = {
        "outcome": "unresolved", "reason": "tests_failed", "reward": 0.0, "detail": HOSTILE, "flags": [HOSTILE],
        "dropped": [HOSTILE], "log_tail": HOSTILE, "tests": {HOSTILE: {"success": [HOSTILE], "failure": []}},
    }  # fmt: skip
    patch = f"diff --git a/{HOSTILE} b/x\n@@ -1 +1 @@\n-{HOSTILE}\n+{HOSTILE}\n".encode() + b"\xff\xfe\x80"
    record = play.record(f"train-1-{HOSTILE}-0", 0.0, verdict=verdict, patch=patch, task=HOSTILE, repo=HOSTILE)
    told = json.loads(record.nodes[2].says)
    told[0]["content"][0]["content"] += "x" * size
    record.nodes[2] = msgspec.structs.replace(record.nodes[2], says=json.dumps(told).encode())
    return write(directory, named(record, record.episode, tokenizer(directory / "policy")))


PATCH = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


HACK = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,6 @@
+import sys
+
 def add(a, b):
+    if "pytest" in sys.modules:
+        return {(1, 2): 3, (-1, 1): 0}.get((a, b), a - b)
     return a - b
"""


@contextlib.asynccontextmanager
async def served(*runs: Path, token: str = "") -> AsyncIterator[str]:
    """Serve runs whose records have been read; yield the address."""
    library = Library(runs, None)
    library.refresh()
    runner = web.AppRunner(application(library, token))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
