"""This module reads what is exported: the episodes of runs, one in memory at a time, and their conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rl.data.choice import Chosen, Entry
from rl.export import unrender
from rl.export.conversation import Conversation, conversations
from rl.export.unrender import Unreadable, Unrenderer
from rollout.proxy.messages import ChatMessage

KINDS = {"main": ("main",), "agents": ("main", "agent"), "all": ("main", "agent", "side")}


@dataclass
class Source:
    """A source is the episodes that are exported, and how.

    ``out``: where they go; ``threads``: a key of KINDS; ``thinking``: whether it is exported; ``name``: the user's, of
    the data set or the model; ``tokenizer``: where it is, None for where the records say; ``overrides``: of train.yaml;
    ``skip``: episodes that were exported before. ``left_out``: a line for each episode that could not be exported;
    ``exported``: the names of the others; ``progress``: is called with how many were read, of all.
    """

    chosen: Chosen
    out: Path
    threads: str = "agents"
    thinking: bool = True
    name: str = ""
    tokenizer: Path | None = None
    skip: frozenset[str] = frozenset()
    left_out: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    progress: Callable[[int, int], object] = lambda done, total: None

    @property
    def data_set(self) -> str:
        """Return the name of LLaMA-Factory's data set."""
        return self.name or "episodes"

    def entries(self) -> list[Entry]:
        """Return the episodes that were not exported before."""
        return [one for one in self.chosen.entries if one.facts["episode"] not in self.skip]

    def talks(self, graded: bool = False) -> Iterator[tuple[Entry, list[Conversation]]]:
        """Iterate over episodes with their conversations of the kinds that are wanted; one without any is left out.

        graded: only those with a verdict.
        """
        entries = [one for one in self.entries() if one.graded or not graded]
        for number, entry in enumerate(entries):
            self.progress(number, len(entries))
            if found := self.of(entry):
                self.exported.append(entry.facts["episode"])
                yield entry, found

    def of(self, entry: Entry) -> list[Conversation]:
        """Return the conversations of an episode; without any, ``left_out`` says why."""
        try:
            made = conversations(entry.record(), self._unrenderer)
            found = [one for one in made if one.kind in KINDS[self.threads]]
            why = "none of its conversations is wanted" if made else "it has no reply that is trained on"
        except Unreadable as error:
            found, why = [], str(error)
        if not found:
            self.left_out.append(f"{entry.path}, offset {entry.offset}: {entry.facts['episode']}: {why}")
        if not self.thinking:
            for message in (message for one in found for message in one.messages):
                message.pop("reasoning_content", None)
        return found

    def pairs(
        self, same: Callable[[list[ChatMessage], list[ChatMessage]], bool]
    ) -> Iterator[tuple[Entry, Conversation, Conversation]]:
        """Iterate over pairs of a resolved and an unresolved episode of a task: the entry of the first, and the first
        main conversations of both. Each episode is in one pair at most.

        Both must have begun with the same prompt and tools, and must not be the same: ``same`` compares their messages.
        Else the pair is left out, with a line.
        """
        tasks: dict[str, tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
        for entry in self.entries():
            if entry.graded:
                tasks[entry.task][not entry.facts["resolved"]].append(entry)
        for number, (good, bad) in enumerate(tasks.values()):
            self.progress(number, len(tasks))
            for better, worse in zip(good, bad, strict=False):
                found = [[talk for talk in self.of(one) if talk.kind == "main"] for one in (better, worse)]
                if not all(found):
                    continue
                (chosen, *_), (rejected, *_) = found
                names = [one.facts["episode"] for one in (better, worse)]
                why = ""
                if beginning(chosen) != beginning(rejected):
                    why = "did not begin with the same prompt"
                elif same(chosen.messages, rejected.messages):
                    why = "do not part in a reply"
                if why:
                    self.left_out.append(f"{better.path}: {' and '.join(names)} {why}")
                else:
                    self.exported += names
                    yield better, chosen, rejected

    def _unrenderer(self, recorded: str) -> Unrenderer:
        return unrender.load(str(self.tokenizer or recorded))


def beginning(talk: Conversation) -> object:
    """Return what a conversation begins with: the messages before the first reply, and the tools."""
    return talk.messages[: min(talk.replies)], talk.tools
