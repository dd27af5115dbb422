"""The expert that plays the episodes a policy is warm-started on: it reads, edits, checks and tries again.

The expert has the gold patch of its task, but finds it by trying: a share of its tries are the gold edit, the others
exchange a word or an operator of what it has read (``rl.data.make.swaps``). If it has a command that checks, it runs
it, and if that is not content it takes the edit back and tries again, or gives up. Sometimes it does not check, or
forgets to take an edit back. So imitation teaches a policy how an episode goes, and some of what is right; reward can
teach the rest: to go on, to believe the check, to look before trying.

The calls of an episode follow from its seed and from what they gave, so an episode is the same whatever others are
played before or beside it.
"""

from __future__ import annotations

import posixpath
import random
import re
import shlex
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import unidiff
import unidiff.errors

from rewards.task import Task
from rl.config.compose import ConfigError
from rl.data.make.swaps import swaps
from rl.run.screen import Screen
from rl.traces.collect.outputs import Collection
from rollout.episode import Setup
from rollout.proxy.engine import ScriptedEngine
from rollout.proxy.messages import ChatMessage
from rollout.proxy.render import ChatTemplateRenderer, turn_end

DONE = "Done."
_AROUND = 12  # lines read before and after an edit, at least
_SHORT = 200  # lines of a file that is read as a whole
_LINE = re.compile(r"^ *(\d+)(?:\t|→)(.*)$")


class CannotPlayError(ValueError):
    """The expert cannot play a task, or in the form of a model. The message is one line."""


@dataclass(frozen=True)
class Habits:
    """Habits say how an expert behaves; configs/collect.yaml describes each."""

    seed: int
    check: str | None
    tries: int
    right: float
    gives_up: float
    unchecked: float
    forgets: float


class Form:
    """A form writes calls, and finds what they gave in prompts, as a model's chat template writes them. ``done``: the
    last reply.

    Raises CannotPlayError if the template writes no calls.
    """

    def __init__(self, renderer: ChatTemplateRenderer) -> None:
        self._renderer, self._end = renderer, renderer.tokenizer.decode(renderer.closing)
        self.done = self._written({"role": "assistant", "content": DONE})
        call = self.call("Read", file_path=_WORD)
        result: ChatMessage = {"role": "tool", "tool_call_id": _ID, "content": _RESULT}
        told = [*_ASK, _message("Read", {"file_path": _WORD}), result]
        head, _, after = renderer.text(told, [], add_generation_prompt=True).rpartition(_RESULT)
        # What a template writes before a call, such as an empty thought, it may leave out before one that has a result.
        _, found, before = head.rpartition(call.rpartition(_WORD)[2] + self._end)
        reminded = renderer.text([*told, {"role": "user", "content": _WORD}], []).rpartition(_RESULT)[2]
        more = reminded.partition(_WORD)[0]
        if not (found and after and more and _WORD in call):
            raise CannotPlayError("the model's chat template does not write calls and what they give (docs/models.md)")
        opened = re.escape(before).replace(re.escape(_ID), r"\S+?")
        self._results = re.compile(f"{opened}(.*?)(?:{re.escape(after)}|{re.escape(more)})", re.DOTALL)

    def call(self, name: str, **parameters: Any) -> str:
        """Return the text of a call."""
        return self._written(_message(name, parameters))

    def _written(self, message: ChatMessage) -> str:
        before = self._renderer.text(_ASK, [], add_generation_prompt=True)
        whole = self._renderer.text([*_ASK, message], [])
        if not whole.startswith(before):
            raise CannotPlayError("the model's chat template does not write a call as the end of a prompt")
        text = whole.removeprefix(before)
        return text.partition(self._end)[0] if self._end else text

    def results(self, prompt: str, start: int) -> list[str]:
        """Return what the calls of a prompt gave, from a place in it on."""
        return self._results.findall(prompt, start)


_ASK: list[ChatMessage] = [{"role": "user", "content": "?"}]
_WORD, _ID, _RESULT = "zq7", "call_zq8", "zq9"


def _message(name: str, parameters: dict[str, Any]) -> ChatMessage:
    call = {"type": "function", "id": _ID, "function": {"name": name, "arguments": parameters}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@dataclass(frozen=True)
class Edit:
    """An edit replaces a text of a file by another one. ``line``: where it begins, from 1."""

    path: str
    line: int
    old: str
    new: str


def gold_edits(task: Task) -> list[Edit]:
    """Return the edits of a task's gold patch, a hunk each. Raises CannotPlayError."""
    try:
        files = unidiff.PatchSet(task.patch or "")
    except (unidiff.errors.UnidiffParseError, ValueError) as error:
        raise CannotPlayError("a patch that cannot be parsed") from error
    edits = [Edit(file.path, hunk.source_start, *_sides(hunk)) for file in files for hunk in file]
    changed = all(file and file.is_modified_file and not file.is_rename for file in files)
    if not edits or not changed or not all(one.old for one in edits):
        raise CannotPlayError("a patch that does more than change files, or no patch")
    return edits


def _sides(hunk: unidiff.Hunk) -> list[str]:
    """Return what a hunk replaces, and by what, both without the last end of line, which a file may lack."""
    texts = ["".join(line.value for line in lines) for lines in (hunk.source_lines(), hunk.target_lines())]
    return [text[:-1] for text in texts] if all(text.endswith("\n") for text in texts) else texts


class Expert:
    """An expert is a script for ``rollout.proxy.engine.ScriptedEngine`` that plays one episode of a task.

    tools: the agent's, None for all. Raises CannotPlayError.
    """

    def __init__(self, task: Task, seed: str, form: Form, tools: Sequence[str] | None, habits: Habits) -> None:
        self._seed, self._form, self._habits = seed, form, habits
        self._reads, edits, self._runs = (tools is None or name in tools for name in ("Read", "Edit", "Bash"))
        self._edits = edits and self._reads  # Claude Code edits what Read has shown it
        self._statement = task.problem_statement.strip()
        self._gold = gold_edits(task)

    def __call__(self, prompt: str) -> str:
        """Return the reply to a prompt; one that has no statement and tools is a side call's."""
        start = prompt.find(self._statement)
        if start < 0 or ("Read" if self._reads else "Bash") not in prompt:
            return self._form.done
        moves = self._moves(random.Random(self._seed))
        try:
            reply = next(moves)
            for result in self._form.results(prompt, start + len(self._statement)):
                reply = moves.send(result)
        except StopIteration:
            return self._form.done
        return reply

    def _moves(self, rng: random.Random) -> Generator[str, str]:
        """Yield the replies; each is followed by what its call gave."""
        habits, seen, whole = self._habits, dict[str, str](), set[str]()
        for path in dict.fromkeys(one.path for one in self._gold):
            if posixpath.dirname(path) and self._runs:
                yield self._form.call("Bash", command=f"git ls-files | grep {shlex.quote(posixpath.basename(path))}")
            lines = [one.line + n for one in self._gold if one.path == path for n in (0, one.old.count("\n"))]
            first, last = max(1, min(lines) - _AROUND), max(lines) + _AROUND
            if last <= _SHORT:
                whole.add(path)
            if self._reads:
                part = {} if path in whole else {"offset": first, "limit": last - first + 1}
                seen[path] = _text((yield self._form.call("Read", file_path=path, **part)))
            else:
                shown = "cat" if path in whole else f"sed -n '{first},{last}p'"
                seen[path] = (yield self._form.call("Bash", command=f"{shown} {shlex.quote(path)}")) + "\n"
        gold, wrong = self._choices(seen, whole)
        rng.shuffle(wrong)
        done: list[Edit] = []
        for _ in range(habits.tries):
            back = [] if rng.random() < habits.forgets else done
            done = gold if not wrong or rng.random() < habits.right else [wrong.pop()]
            yield from self._change(back, done)
            if not self._runs or habits.check is None or rng.random() < habits.unchecked:
                return
            said = yield self._form.call("Bash", command=habits.check)
            if not said.startswith("Exit code") or rng.random() < habits.gives_up:
                return

    def _choices(self, seen: Mapping[str, str], whole: Set[str]) -> tuple[list[Edit], list[Edit]]:
        """Return the gold edits, as short as a swap where they are one, and the other swaps of what was read.

        whole: files that were read from end to end. In others, the text of a swap may occur again.
        """
        short, wrong = list(self._gold), list[Edit]()
        for path, text in seen.items():
            right = {text.replace(one.old, one.new, 1): n for n, one in enumerate(short) if one.path == path}
            for swap in swaps(text):
                changed, texts = swap.applied(text), swap.texts
                if self._edits:  # lines, as people edit; a text that is there twice is refused, also to take it back
                    old, new = texts = tuple(each.split("\n")[swap.line].strip() for each in (text, changed))
                    if text.count(old) != 1 or changed.count(new) != 1:
                        continue
                edit = Edit(path, swap.line + 1, *texts)
                if (place := right.get(changed)) is None:
                    wrong.append(edit)
                elif path in whole:
                    short[place] = edit
        return short, wrong

    def _change(self, back: Sequence[Edit], edits: Sequence[Edit]) -> Generator[str, str]:
        """Yield the calls that take edits back and make others: with Edit if there is one, else with Bash."""
        if self._edits:
            undone = [replace(one, old=one.new, new=one.old) for one in back[::-1]]
            for one in (*undone, *edits):
                yield self._form.call("Edit", file_path=one.path, old_string=one.old, new_string=one.new)
            return
        reset = f"git checkout -q {shlex.join(dict.fromkeys(one.path for one in back))}; " if back else ""
        for edit in edits:
            yield self._form.call("Bash", command=reset + _command(edit))
            reset = ""


def _command(edit: Edit) -> str:
    """Return the shell command of an edit."""
    path = shlex.quote(edit.path)
    if not _NOT_FOR_SED.search(edit.old + edit.new):
        return f"sed -i 's/{edit.old}/{edit.new}/' {path}"
    change = f"file.write_text(file.read_text().replace({edit.old!r}, {edit.new!r}, 1))"
    return f"python3 - <<'END'\nfrom pathlib import Path\nfile = Path({edit.path!r})\n{change}\nEND"


_NOT_FOR_SED = re.compile(r"[^\w <>=+(),:!\])-]")


def _text(read: str) -> str:
    """Return the text of a file from what Read says of it, with an end of line after the last one."""
    return "".join(f"{found[2]}\n" for line in read.split("\n") if (found := _LINE.match(line)))


class ExpertCollection(Collection):
    """A collection that an expert plays, in the form of the config's policy."""

    def begin(self, directory: Path, setup: Setup) -> Setup:
        """See ``Collection``. Raises ConfigError if the expert cannot write calls."""
        renderer = setup.policy.renderer
        assert isinstance(renderer, ChatTemplateRenderer)
        try:
            self._form = Form(renderer)
        except CannotPlayError as error:
            raise ConfigError(f"policy: {error}") from error
        self._end = turn_end(renderer.tokenizer)
        return super().begin(directory, setup)

    def setup_of(self, task: Task, sample: int) -> Setup:
        """Return the set-up of an episode, whose engine is the expert."""
        habits = Habits(**self.config.expert)
        seed = f"{habits.seed}:{task.instance_id}:{sample}"
        expert = Expert(task, seed, self._form, self.config.agent.tools, habits)
        engine = ScriptedEngine(self._setup.policy.tokenizer, self._end, expert)
        return replace(self._setup, policy=replace(self._setup.policy, engine=engine))


def playable(tasks: Sequence[Task], tools: Sequence[str] | None, screen: Screen) -> list[Task]:
    """Return the tasks that an expert can play, after a line about the others. Raises ConfigError if there are none."""
    if tools is not None and "Bash" not in tools and not {"Read", "Edit"}.issubset(tools):
        raise ConfigError("agent.tools: an expert needs Bash, or Read and Edit")
    found, left = list[Task](), Counter[str]()
    for task in tasks:
        try:
            gold_edits(task)
            found.append(task)
        except CannotPlayError as error:
            left[str(error)] += 1
    for reason, count in left.items():
        screen.say(f"left out: {count} tasks with {reason}")
    if not found:
        raise ConfigError("data: none of these tasks has a gold patch that an expert can play")
    return found
