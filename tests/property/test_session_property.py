"""Invariants 1 and 2 hold for a client that does what Claude Code does, and more, in any order.

A state machine plays the client. It opens threads, extends them, branches off at earlier points, repeats requests,
loses replies, hangs up and makes side calls. It rewrites the history as Claude Code does, with or without sampled
thinking. The session must keep the exact tokens.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import Phase, example, given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from rollout import SIDE_MODEL
from rollout.proxy.messages import MessageMemory, Spans, conversation
from rollout.proxy.replies import Reply, reply_json
from rollout.proxy.session import Call, Session
from rollout.proxy.tree import Match, Node, Tree
from rollout.proxy.wire import decode_request
from tests.kit import CharRenderer, QueueEngine, char_policy

words = st.text("abc <>[]\n", min_size=1, max_size=12)
plain = st.text("xyz ", min_size=1, max_size=10).filter(lambda s: s.strip())
calls = st.builds(lambda a, n: f"[[Edit {json.dumps({'file_path': a, 'new': n})}]]", plain, plain)
said = st.one_of(plain, calls, st.builds(lambda t, c, d: f"{t} {c}{d}", plain, calls, calls))
replies = st.one_of(said, st.builds(lambda thought, s: f"(({thought})){s}", plain, said))


class CheckedTree(Tree):
    """A tree that finds the same place from where earlier requests were as from the root."""

    def match(self, head: bytes, spans: Spans) -> Match:
        found = super().match(head, spans)
        ways, self._ways = self._ways, []
        anew = super().match(head, spans)
        self._ways = ways
        assert (found.base, found.context) == (anew.base, anew.context)
        assert [span.exact for span in found.rest] == [span.exact for span in anew.rest]
        return found


class Client(RuleBasedStateMachine):
    threads = Bundle("threads")  # a thread is a list of (message, index of the reply's node or None)

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.renderer = CharRenderer()
        self.engine = QueueEngine()
        policy = char_policy(self.engine, self.renderer, max_tokens=60)
        self.session = Session("e", replace(policy, train_side_calls=False))
        self.session.tree = CheckedTree()
        self.leaves: set[tuple[int, ...]] = set()  # the chains of replies that the client has received
        self.fresh = 0
        self.twins: set[int] = set()  # replies that only the signature of their thinking tells from another one

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    def call(self, messages: list[dict[str, Any]], retry: bool = False, **more: Any) -> Call:
        body = {"model": "m", "max_tokens": 1000, "system": "sys", "messages": messages, **more}
        return self.session.prepare(decode_request(json.dumps(body).encode()), retry)

    def ask(self, messages: list[dict[str, Any]], reply: str, deliver: bool, retry: bool = False) -> Node:
        self.engine.replies = [reply]
        call = self.call(messages, retry)
        node = self.loop.run_until_complete(call.reply())
        node.delivered = node.delivered or deliver
        return node

    @rule(target=threads, text=words, reply=replies)
    def open(self, text: str, reply: str) -> list[Any]:
        self.fresh += 1  # two threads that start with the same message would share their first node
        message = {"role": "user", "content": f"{self.fresh} {text}"}
        return self.extend([(message, None)], reply)

    @rule(target=threads, thread=threads, text=words, reply=replies, data=st.data())
    def follow(self, thread: list[Any], text: str, reply: str, data: st.DataObject) -> list[Any]:
        """The agent goes on, with results of all calls and a rewritten history, sometimes in another branch."""
        history, message = self.next_request(thread, text, data)
        return self.extend([*history, (message, None)], reply)

    @rule(
        target=threads,
        thread=threads,
        text=words,
        silent=st.sampled_from(["", "((hm))"]),
        reply=replies,
        data=st.data(),
    )
    def follow_silent(self, thread: list[Any], text: str, silent: str, reply: str, data: st.DataObject) -> list[Any]:
        """A reply without visible content is dropped, and a reminder is added to the message before it."""
        history, message = self.next_request(thread, text, data)
        node = self.ask([*(m for m, _ in history), message], silent, deliver=True)
        nudged = {"role": "user", "content": [*message["content"], {"type": "text", "text": "go on!"}]}
        return self.extend([*history, (nudged, node.index)], reply)

    def next_request(self, thread: list[Any], text: str, data: st.DataObject) -> tuple[list[Any], dict[str, Any]]:
        answered = self.session.tree.nodes[thread[-1][1]].reply
        results = [{"type": "tool_result", "tool_use_id": i, "content": text} for i in sorted(answered.tool_ids)]
        self.fresh += 1
        content: Any = [*results, {"type": "text", "text": f"{self.fresh} {text}"}]
        history = [(rewritten(m, data, thought=node in self.twins), node) for m, node in thread]
        return history, {"role": "user", "content": content}

    @rule(target=threads, thread=threads)
    def twin(self, thread: list[Any]) -> list[Any]:
        """The last request of a thread comes once more, from somebody else, and the reply has the same words, but comes
        after a thought."""
        self.fresh += 1
        said = self.session.tree.nodes[thread[-1][1]]
        if any(block["type"] == "thinking" for block in said.reply.blocks):
            return thread
        made = self.extend(thread[:-1], f"((t{self.fresh})){said.reply.text or 'x'}")
        assert made[-1][1] != said.index
        self.twins.add(made[-1][1])
        return made

    @rule(thread=threads, reply=replies, data=st.data())
    def retry(self, thread: list[Any], reply: str, data: st.DataObject) -> None:
        """A retry of the thread's last request gets the same reply, and nothing is sampled."""
        if len(self.session.tree.children(self.session.tree.nodes[thread[-1][1]].parent)) > 1:
            return  # nothing says of which of several equal requests it is the retry
        drawn = self.engine.drawn
        history, (last, _) = thread[:-2], thread[-2]  # nobody rewrites what is new, but its form may differ
        before = (rewritten(message, data, thought=node in self.twins) for message, node in history)
        messages = [*before, reformed(last, data)]
        node = self.ask(messages, reply, deliver=True, retry=True)
        assert node.index == thread[-1][1]
        assert self.engine.drawn == drawn

    @rule(thread=threads, text=plain, first=replies, second=replies)
    def lost(self, thread: list[Any], text: str, first: str, second: str) -> None:
        """A reply never arrives. The next request gets the same one; without one it is not trained on."""
        self.fresh += 1
        messages = [message for message, _ in thread] + [{"role": "user", "content": f"{self.fresh} {text}"}]
        node = self.ask(messages, first, deliver=False)
        again = self.ask(messages, second, deliver=False)
        assert again is node

    @rule(thread=threads, text=plain, reply=replies)
    def hang_up(self, thread: list[Any], text: str, reply: str) -> None:
        """The client hangs up during a generation, which is aborted and leaves nothing."""
        self.fresh += 1
        messages = [message for message, _ in thread] + [{"role": "user", "content": f"{self.fresh} {text}"}]
        aborted, sampled = self.session.counters.aborted, self.session.tree.sampled_tokens()
        self.engine.hangs = True
        waiting = self.loop.create_task(self.call(messages).reply())
        self.loop.run_until_complete(asyncio.wait([waiting], timeout=0.001))
        waiting.cancel()
        self.loop.run_until_complete(asyncio.wait([waiting]))
        self.engine.hangs = False
        assert self.session.counters.aborted == aborted + 1
        assert self.session.tree.sampled_tokens() == sampled
        assert not self.ask(messages, reply, deliver=False).delivered  # the next request is sampled anew

    @rule(text=plain, reply=replies)
    def side_call(self, text: str, reply: str) -> None:
        """A side call is answered and not trained on."""
        self.fresh += 1
        self.engine.replies = [reply]
        call = self.call([{"role": "user", "content": f"{self.fresh} {text}"}], model=SIDE_MODEL)
        node = self.loop.run_until_complete(call.reply())
        node.delivered = True
        assert not node.trained

    def extend(self, history: list[Any], reply: str) -> list[Any]:
        encoded, tree = self.renderer.encoded, self.session.tree
        before = tree.tokens - tree.sampled_tokens()
        node = self.ask([message for message, _ in history], reply, deliver=True)
        held = [index for _, index in history if index is not None]
        # Invariant 2: the prompt extends the tokens of this thread's earlier replies.
        assert [n.index for n in node.path() if n.sampled] == [*held, node.index]
        assert self.renderer.encoded - encoded == (tree.tokens - tree.sampled_tokens()) - before
        assert self.engine.prompts[-1] + node.ids == node.path_ids()
        self.leaves.add((*held, node.index))
        blocks = [dict(block) for block in reply_json(node.reply, "m")["content"]]
        return [*history, ({"role": "assistant", "content": blocks}, node.index)]

    @invariant()
    def every_sampled_token_once(self) -> None:
        if not hasattr(self, "session"):
            return
        tree = self.session.tree
        rows = tree.sequences()
        delivered = [n for n in tree.nodes if n.sampled and n.delivered and n.trained]
        assert sorted(i for row in rows for i in row.nodes) == [n.index for n in delivered]
        trained = [p for row in rows for p, m in zip(row.logprobs, row.mask, strict=True) if m]
        assert sorted(trained) == sorted(p for n in delivered for p in n.logprobs or [])
        for row in rows:
            assert len(row.response_ids) == len(row.mask) == len(row.logprobs)
            assert row.mask[0] == 1 and all(p == 0.0 for p, m in zip(row.logprobs, row.mask, strict=True) if not m)
            assert row.prompt_ids + row.response_ids == tree.nodes[row.nodes[-1]].path_ids()
        # There are as few rows as possible: one per chain that is not the beginning of another one.
        tops = {c for c in self.leaves if not any(c != d and d[: len(c)] == c for d in self.leaves)}
        assert len(rows) == len(tops)


def rewritten(message: dict[str, Any], data: st.DataObject, thought: bool = False) -> dict[str, Any]:
    """Return a message as Claude Code may send it back; ``thought``: with its thinking in any case."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(b) for b in content]
    if not thought and data.draw(st.booleans()):
        blocks = [block for block in blocks if block["type"] != "thinking"]
    if not blocks:
        return {"role": message["role"], "content": "(no content)"}
    for block in blocks:
        if block["type"] == "text" and message["role"] == "assistant":
            block["text"] = data.draw(st.sampled_from([block["text"], block["text"].strip(), f" {block['text']}\n"]))
        if block["type"] == "tool_use" and data.draw(st.booleans()):
            block["input"] = {"replace_all": False, **dict(reversed(block["input"].items()))}
        if block["type"] == "tool_result" and data.draw(st.booleans()):
            was = block["content"] if isinstance(block["content"], str) else block["content"][0]["text"]
            block["content"] = [{"type": "text", "text": f"{was}\n<system-reminder>x</system-reminder>"}]
    if message["role"] == "user" and data.draw(st.booleans()):
        blocks.append({"type": "text", "text": "<system-reminder>remember</system-reminder>"})
    return reformed({"role": message["role"], "content": blocks}, data)


def reformed(message: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Return a message in another form with the same content."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(b) for b in content]
    if data.draw(st.booleans()):
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    if len(blocks) == 1 and blocks[0]["type"] == "text" and data.draw(st.booleans()):
        return {"role": message["role"], "content": blocks[0]["text"]}
    return {"role": message["role"], "content": blocks}


Client.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
TestSession = Client.TestCase


NEAR = "a <system-reminder>x</system-reminder>"
asked = st.sampled_from(["a", "b", NEAR])
answers = st.sampled_from(["x y", "xy", "(no content)"])
requests = st.tuples(st.lists(st.tuples(asked, answers), max_size=2), asked, answers, st.booleans())


@settings(max_examples=300)
@example(
    [([], NEAR, "xy", True), ([("a", "xy")], "b", "xy", True), ([], "a", "xy", True), ([("a", "xy")], "b", "", True)]
)
@given(st.lists(requests, max_size=12))
def test_a_request_is_in_the_same_place_whatever_was_asked_before(
    calls: list[tuple[list[tuple[str, str]], str, str, bool]],
) -> None:
    """Prompts and replies are often alike, or nearly."""
    tree, seen = CheckedTree(), MessageMemory()
    for before, content, said, delivered in calls:
        texts = [*(text for turn in before for text in turn), content]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        talk = conversation(decode_request(json.dumps({"messages": messages}).encode()), seen)
        match = tree.match(talk.head.key, talk.spans)
        context = match.context or tree.add_context(match.base, talk.head.key, match.rest, [1])
        reply = Reply(f"{len(tree.nodes)}", ({"type": "text", "text": said},), "end_turn", 0, 0)
        node = tree.add_sampled(context, [2], [0.0], reply, text=said, ended=True)
        node.delivered = delivered
