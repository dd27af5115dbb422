"""The command ``ccrl``: all programs for users, in the order in which people meet them."""

from __future__ import annotations

import difflib
import os
import sys
from typing import NamedTuple

from rl.config.compose import config_folders
from rl.config.overrides import options


class Use(NamedTuple):
    """A use is a program, the module that ``python -m`` starts, and what it is for."""

    module: str
    purpose: str


USES = {
    "train": Use("rl.train", "train a policy with reinforcement learning; +experiment=quickstart is a toy on a CPU"),
    "view": Use("rollout.view", "look at a run's episodes in a browser"),
    "evaluate": Use("rl.evaluate", "resolve rates of a policy, or of a model behind a server"),
    "plan": Use("rl.plan", "what a run takes: GPU memory, time, disk"),
    "keys": Use("rl.keys", "what a key of the config does, and where it is set"),
    "report": Use("rl.report", "curves and figures of runs as one page"),
    "dashboard": Use("rl.dashboard", "a workspace in wandb"),
    "records": Use("rollout.records", "read episodes in the terminal"),
    "audit": Use("rollout.audit", "prove that a run's records are exact"),
    "sft": Use("rl.sft", "fine-tune a policy on episodes, once or in rounds"),
    "adapter": Use("rl.sft.adapter", "add an adapter to its model's weights"),
    "tasks make": Use("rl.data.make", "make tasks of any Python package"),
    "tasks functions": Use("rl.data.functions", "make small tasks of single functions"),
    "tasks convert": Use("rl.data.convert", "take tasks from SWE-bench, SWE-Gym and others"),
    "tasks admit": Use("rl.data.admit", "keep the tasks whose gold patch is graded as it must be"),
    "tasks images": Use("rl.data.images", "put made tasks into container images"),
    "tasks export": Use("rl.data.export", "write made tasks in Harbor's format, for other systems"),
    "tasks pull": Use("rl.boxes", "pull and seal the images of tasks"),
    "tasks overlap": Use("rl.data.overlap", "find what training and held-out tasks have in common"),
    "tasks probe": Use("rl.data.probe", "measure how often a policy resolves each task"),
    "proxy": Use("rollout.proxy", "Claude Code with any vLLM server, exactly recorded"),
    "agents": Use("rl.agents", "install other agents than Claude Code: Codex, OpenCode and others"),
    "collect": Use("rollout.collect", "play tasks without training, and keep everything"),
    "traces select": Use("rl.data.select", "choose episodes by what they are"),
    "traces ingest": Use("rl.ingest", "read conversations of other programs"),
    "traces export": Use("rl.export", "write episodes in the formats of other programs"),
    "traces store": Use("rl.store", "send episodes to an agentlightning store"),
    "teach": Use("rl.teachers", "let other models answer recorded states"),
    "teach restate": Use("rl.teachers.restate", "let a model word the statements of tasks"),
    "teach bugs": Use("rl.teachers.bugs", "let a model write bugs for tasks"),
    "cluster": Use("rl.cluster", "train on several nodes of SLURM"),
    "smoke": Use("rl.smoke", "prove that a cluster can do what a run needs"),
}


def help_text() -> str:
    """Return what ``ccrl --help`` prints."""
    width = max(map(len, USES))
    lines = [f"  {name:<{width}}  {use.purpose}" for name, use in USES.items()]
    return "\n".join([
        "usage: ccrl USE [argument ...]", "",
        "Train coding models by reinforcement learning inside the real Claude Code. docs/README.md", "",
        *lines, "",
        "ccrl USE --help says more. python -m MODULE starts the same programs, as the documents write it. For bash to",
        "complete uses, experiments and choices: complete -C 'ccrl completion' ccrl",
    ])  # fmt: skip


def completions(line: str) -> list[str]:
    """Return the words that the last one of a command line may become; of one with =, what may follow that."""
    _, *words = line.split(" ")
    typed, last = " ".join(words), words[-1] if words else ""
    names = {name for name in USES if name.startswith(typed)}
    if not names and (words[0] in USES or " ".join(words[:2]) in USES):
        folders = config_folders()
        groups = {folder.name for place in folders for folder in place.iterdir() if folder.is_dir()} - {"base"}
        found = [f"{'+' * (group == 'experiment')}{group}={one}" for group in groups for one in options(group, folders)]
        return sorted(one[last.rfind("=") + 1 :] for one in found if one.startswith(last))
    at = len(typed) - len(last)
    return sorted({name[at:].partition(" ")[0] for name in names})


def main() -> None:
    """Start the program that the first one or two words name, with the other arguments."""
    words = sys.argv[1:]
    if words[:1] == ["completion"]:
        print("\n".join(completions(os.environ.get("COMP_LINE", ""))))
        return
    for length in (2, 1):
        if use := USES.get(" ".join(words[:length])):
            os.execv(sys.executable, [sys.executable, "-m", use.module, *words[length:]])
    wanted = not words or words[0] in ("-h", "--help")
    if not wanted:
        near = [one for n in (2, 1) for one in difflib.get_close_matches(" ".join(words[:n]), USES, n=1)]
        print(f"ccrl: there is no use {words[0]!r}{f'; did you mean {near[0]}?' if near else ''}", file=sys.stderr)
    print(help_text(), file=sys.stdout if wanted else sys.stderr)
    sys.exit(0 if wanted else 2)
