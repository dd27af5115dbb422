"""The episodes of runs that are exported, one in memory at a time, and their conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rl.data.choice import Choice, ChoiceEntry, Progress, paired
from rl.traces.export.conversation import ChatConversation, UnreadableEpisode, conversations
from rollout.proxy.blocks import ChatMessage
from rollout.trace import TraceError

KINDS = {"main": ("main",), "agents": ("main", "agent"), "all": ("main", "agent", "side")}


@dataclass
class ExportSource:
    """A source is the episodes that are exported, and how.

    ``threads``: a key of KINDS; ``thinking``: whether it is exported; ``name``: the user's, of the data set or the
    model; ``skip``: episodes that were exported before. ``left_out``: a line for each episode that could not be
    exported; ``exported``: the names of the others; ``progress``: is called with how many were read, of all.
    """

    chosen: Choice
    threads: str = "agents"
    thinking: bool = True
    name: str = ""
    skip: frozenset[str] = frozenset()
    left_out: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    progress: Progress = lambda done, total: None

    @property
    def data_set(self) -> str:
        """Return the name of LLaMA-Factory's data set."""
        return self.name or "episodes"

    def entries(self) -> list[ChoiceEntry]:
        """Return the episodes that were not exported before."""
        return [one for one in self.chosen.entries if one.facts["episode"] not in self.skip]

    def talks(self) -> Iterator[tuple[ChoiceEntry, list[ChatConversation]]]:
        """Iterate over episodes with their conversations of the kinds that are wanted. One without any is left out,
        unless the infrastructure failed it: that it has failed is what there is to say."""
        entries = self.entries()
        for number, entry in enumerate(entries):
            self.progress(number, len(entries))
            if (found := self.of(entry)) or entry.facts["infra"]:
                self.exported.append(entry.facts["episode"])
                yield entry, found

    def of(self, entry: ChoiceEntry) -> list[ChatConversation]:
        """Return the conversations of an episode; without any, ``left_out`` says why."""
        try:
            made = conversations(entry.record())
            found = [one for one in made if one.kind in KINDS[self.threads]]
            why = "none of its conversations is wanted" if made else "it has no reply that is trained on"
        except (UnreadableEpisode, TraceError) as error:
            found, why = [], str(error)
        if not found and not entry.facts["infra"]:
            self.left_out.append(f"{entry.path}, offset {entry.offset}: {entry.facts['episode']}: {why}")
        if not self.thinking:
            for message in (message for one in found for message in one.messages):
                message.pop("reasoning_content", None)
        return found

    def pairs(
        self, same: Callable[[list[ChatMessage], list[ChatMessage]], bool]
    ) -> Iterator[tuple[ChoiceEntry, ChatConversation, ChatConversation]]:
        """Iterate over pairs of a resolved and an unresolved episode of a task: the entry of the first, and the first
        main conversations of both.

        Both must have begun with the same prompt and tools, and must not be the same: ``same`` compares their messages.
        An episode without a match is left out, with a line.
        """
        known: dict[int, list[ChatConversation]] = {}
        task = ""

        def main(entry: ChoiceEntry) -> list[ChatConversation]:
            nonlocal task
            if entry.task != task:  # pairs come task by task
                known.clear()
                task = entry.task
            if id(entry) not in known:
                known[id(entry)] = [talk for talk in self.of(entry) if talk.kind == "main"]
            return known[id(entry)]

        def part(better: ChoiceEntry, worse: ChoiceEntry) -> tuple[ChatConversation, ChatConversation] | None:
            if not (main(better) and main(worse)):
                return None
            chosen, rejected = main(better)[0], main(worse)[0]
            alike = beginning(chosen) == beginning(rejected)
            return (chosen, rejected) if alike and not same(chosen.messages, rejected.messages) else None

        for better, worse, found in paired(self.entries(), part):
            if worse is not None and found is not None:
                self.exported += [one.facts["episode"] for one in (better, worse)]
                yield better, *found
            elif main(better):
                why = "no unresolved episode of its task begins with the same prompt and parts in a reply"
                self.left_out.append(f"{better.path}: {better.facts['episode']}: {why}")


def beginning(talk: ChatConversation) -> object:
    """Return what a conversation begins with: the messages before the first reply, and the tools."""
    return talk.messages[: min(talk.replies)], talk.tools
