"""The roles of an agent's calls: its main conversation, each type of sub-agent, side calls; no I/O.

A sub-agent's first prompt is the one with which a call of a tool has started it, and that call names its type, each
agent's in its own field. Claude Code also marks the requests of sub-agents, by a header. All that is not proven to be a
sub-agent's is the main conversation's or, on the slot of the small model, a side call.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rollout.proxy.messages import Conversation
from rollout.proxy.texts import squeezed
from rollout.proxy.wire import FULL, BrokenOffError, EndpointError

if TYPE_CHECKING:  # the core runs without HTTP
    from rollout.proxy.calls import CallRecord
    from rollout.proxy.forward import SideEndpoint
    from rollout.proxy.tree import Node

T = TypeVar("T")

MAIN, SIDE, SUBAGENT = "main", "side", "subagent"
# With which Claude Code (2.1.329) names the sub-agent that sends a request.
AGENT_HEADER = "x-claude-code-agent-id"
# Where a call that starts a sub-agent has its prompt and type (Gemini CLI's and Codex's are the last two), and the type
# that a tool starts without being told one.
_FIELDS = (("prompt", "subagent_type"), ("prompt", "agent_name"), ("message", "agent_type"))
_PLAIN = dict.fromkeys(("Agent", "Task", "agent", "task"), "general-purpose") | {
    "multi_agent_v1__spawn_agent": "default"
}
_TYPE = re.compile(r"[\w.:-]{1,64}")
_OTHER = f"{SUBAGENT}/other"
# What is looked at to find a role, in the event loop: as many sub-agents that have not asked yet, and the end of a
# message, in characters.
_STARTED, _TOLD = 100, 1 << 18


@dataclass(frozen=True)
class Rule:
    """A Rule is what a config says of a role: whether the policy is trained on it, or which ``endpoint`` answers it."""

    train: bool = True
    endpoint: SideEndpoint | None = None

    @property
    def told(self) -> dict[str, Any]:
        """Return what a record says of the rule, without the endpoint's key."""
        end = self.endpoint
        return {"train": self.train} if end is None else {"train": False, "endpoint": end.url, "model": end.model}


class Asked(NamedTuple):
    """Asked is whose a call is: its ``role``, "" where roles are not told apart, and its conversation. ``endpoint``:
    what answers it, None: the policy."""

    role: str
    conversation: object
    endpoint: SideEndpoint | None


def rule_of(rules: Mapping[str, T] | None, role: str) -> T | None:
    """Return the rule for a role: its own, or that of all sub-agents; None if no rule is for it."""
    rules = rules or {}
    return rules.get(role, rules.get(SUBAGENT) if role.startswith(f"{SUBAGENT}/") else None)


def endpoints(rules: Mapping[str, Rule] | None, side: SideEndpoint | None) -> list[SideEndpoint]:
    """Return the endpoints that answer in the policy's place: those of rules, and that of side calls."""
    return [one for one in (side, *(rule.endpoint for rule in (rules or {}).values())) if one is not None]


def started(block: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the role of the sub-agent that a block starts, and its first prompt; None for all other blocks."""
    asked = block.get("input")
    if block.get("type") != "tool_use" or not isinstance(asked, Mapping):
        return None
    for text, kind in _FIELDS:
        prompt, named = asked.get(text), asked.get(kind) or _PLAIN.get(str(block.get("name")))
        if isinstance(prompt, str) and isinstance(named, str):
            return f"{SUBAGENT}/{named}" if _TYPE.fullmatch(named) else _OTHER, prompt
    return None


def _inside(text: str) -> str:
    """Return a text without the tag that closes it: between tags, Gemini CLI tells a sub-agent what to do."""
    before, _, tag = text.rpartition("</")
    return before if re.fullmatch(r"\w+>", tag) else text


def turns(nodes: Sequence[Node], calls: Sequence[CallRecord], relayed: bool) -> int:
    """Return the number of replies of the main conversation that have reached the agent, or may have if they are
    relayed. (A fork's begin as these.)"""
    read = [node for node in nodes if node.delivered or (relayed and node.sent)]
    sampled = [node.asked.role for node in read if node.asked is not None]
    return [*sampled, *(call.role for call in calls)].count(MAIN)


class Roles:
    """Roles finds the role of each call of a session.

    ``rules``: by role. ``failing``: conversations whose last call another endpoint has failed to answer, and how.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.failing: dict[object, str] = {}
        self._started: list[tuple[str, str]] = []  # sub-agents that have not asked yet: role, first prompt
        self._known: dict[object, str] = {}  # conversation -> role
        self._heads: dict[bytes, str] = {}  # of a conversation -> the role that first had it
        self._firsts: set[bytes] = set()  # first messages of the main conversation
        self._relayed: set[asyncio.Future[None]] = set()  # calls that are being forwarded

    def sampled(self, role: str) -> bool:
        """Tell whether the policy answers the calls of a role, unless they are side calls."""
        rule = rule_of(self.rules, role)
        return rule is None or rule.endpoint is None

    def heard(self, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Take in a reply before anybody acts on it: it may start sub-agents."""
        new = [(one[0], squeezed(one[1])) for one in map(started, blocks) if one is not None]
        self._started = [*self._started, *new][-_STARTED:]

    def answered(self, whose: Asked, status: int, said: str, blocks: Sequence[Mapping[str, Any]] = ()) -> None:
        """Note the reply that another endpoint has given, or its failure, until the conversation's next call. That a
        prompt is too long is an answer."""
        self.heard(blocks)
        self.failing.pop(whose.conversation, None)
        end = whose.endpoint
        if end is not None and end.blamed(status) and FULL not in said and not self.sampled(whose.role):
            text = f"{whose.role}: {end.url}: status {status}: {said}"
            self.failing[whose.conversation] = " ".join(text.split())[:400]

    async def whose(self, talk: Conversation, agent: str, side: bool, endpoint: SideEndpoint | None) -> Asked:
        """Return whose a call is.

        ``agent``: the sub-agent's id, if the client tells. ``side``: the call is on the slot of the small model, which
        ``endpoint`` answers if no rule says otherwise. A client may act on the beginning of a reply whose end still has
        to come from another endpoint; while nothing says whose a call is, such replies are waited for.
        """
        first = talk.spans.identities[0][0]
        conversation = agent or (talk.head.key, first)
        while (role := self._known.get(conversation) or self._begun(talk, agent)) is None and self._relayed:
            await asyncio.wait([*self._relayed], return_when=asyncio.FIRST_COMPLETED)
        role = self._known[conversation] = role or (_OTHER if agent else MAIN)
        self._heads.setdefault(talk.head.key, role)
        self._firsts |= {first} if role == MAIN else set()
        role = SIDE if side and role == MAIN else role
        rule = rule_of(self.rules, role)
        return Asked(role, conversation, rule.endpoint if rule else endpoint)

    def _begun(self, talk: Conversation, agent: str) -> str | None:
        """Return the role of a conversation that begins, None if nothing says it."""
        known = self._heads.get(talk.head.key)
        if not agent and (known == MAIN or talk.spans.identities[0][0] in self._firsts):
            return MAIN  # compacted, or with other tools
        # One that inherits the conversation (a fork) is told last what to do, in a text of the agent's own.
        texts = [squeezed(talk.spans[at].text[-_TOLD:]) for at in ((0, -1) if agent else (0,))]
        inside = [*map(_inside, texts)]
        taken, fits = {*self._heads.values()}, list[tuple[bool, bool, bool, int]]()
        for place, (role, prompt) in enumerate(self._started):
            whole = any(text.endswith(prompt) for text in (*texts, *inside))
            if prompt and (whole or (agent and any(prompt in text for text in texts))):
                fits.append((not whole, role != known, role in taken, place))
        return self._started.pop(min(fits)[-1])[0] if fits else None if known == MAIN else known

    @contextlib.contextmanager
    def relaying(self, whose: Asked) -> Generator[None]:
        """Forward a call in this block, which ends with ``answered``."""
        over = asyncio.get_running_loop().create_future()
        self._relayed.add(over)
        try:
            yield
        except (EndpointError, BrokenOffError) as error:
            self.answered(whose, error.status if isinstance(error, EndpointError) else 529, str(error))
            raise
        finally:
            self._relayed.discard(over)
            over.set_result(None)
