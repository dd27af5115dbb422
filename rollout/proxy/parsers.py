"""Parse sampled text into content blocks, with vLLM's reasoning and tool parsers made strict.

vLLM's tool parsers are written to get something out of any text: from a call without an end they read as much as there
is, and they drop junk between arguments and text after a call. In training that is wrong for two reasons: the agent
would act on something that the policy did not say, and the policy would never learn to say it correctly. ``FORMATS``
therefore defines what a well-formed call looks like in each format. If a marker of a call is left over outside of
well-formed calls, the reply is malformed and stays text, exactly as sampled. Otherwise vLLM's parser reads the calls:
names, arguments and their types.

vLLM is imported when a parser is made, not with this module: the import takes seconds and hundreds of MB.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from rollout import storable
from rollout.proxy.messages import Block

log = logging.getLogger(__name__)

# The number of tool lists whose parsers are kept. A session has a few: its main thread's and its sub-agents'.
_KEPT = 256


@dataclass(frozen=True)
class ParsedReply:
    """A ParsedReply is what a reply says.

    ``blocks``: thinking, text and tool_use blocks (the last without ids), in the order in which they were sampled;
    white space that stands alone between them is left out. ``malformed``: the reply has a call that cannot be read.
    """

    blocks: list[Block]
    malformed: bool = False


class ReplyParser(Protocol):
    """A ReplyParser parses what a policy sampled."""

    @property
    def spec(self) -> str:
        """Return what it parses: ``TOOL`` or ``TOOL+REASONING``, names of vLLM's parsers. Records keep it."""
        ...

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        """Parse one reply. ``tools`` are those that the agent offered, in chat form; without any there are no calls."""
        ...


@dataclass(frozen=True)
class CallFormat:
    """A CallFormat says what well-formed calls look like.

    ``section`` matches one or more whole calls with the markers around them, ``call`` one of these calls. ``call`` has
    the groups ``name`` (of the tool) and ``json`` (the arguments, which are then decoded here) if the format allows
    it. ``key``, in formats whose arguments are not JSON, matches an argument; its groups are the argument's name and
    what is written as its value, which stands on lines of its own if ``lines``. ``starts`` and ``ends`` are the markers
    that appear only in calls. ``plain``, in some formats, matches a call without "<" in its values, which cannot be
    misread; its groups are the tool's name and all arguments, each of which ``_ARGUMENT`` matches.
    """

    section: re.Pattern[str]
    call: re.Pattern[str]
    key: re.Pattern[str] | None
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    lines: bool = False
    plain: re.Pattern[str] | None = None

    def wants_call(self, text: str) -> bool:
        """Tell whether a text has any marker of a call."""
        return any(marker in text for marker in (*self.starts, *self.ends))

    def values(self, call: str) -> list[tuple[str, str]]:
        """Return names and values of the arguments of a call, as they are written."""
        return [(key, self.value(written)) for key, written in (self.key.findall(call) if self.key else [])]

    def value(self, written: str) -> str:
        """Return the value that is meant by what stands between the markers of an argument."""
        return written.removeprefix("\n").removesuffix("\n") if self.lines else written

    def shortened(self, text: str) -> str:
        """Return the text for vLLM's parser, without arguments that are decoded here.

        vLLM's parser for Kimi walks through JSON one character at a time: a second for a written file of 20 KB.
        """
        if "json" not in self.call.groupindex:
            return text
        return self.call.sub(lambda call: call.group().replace(call["json"], "{}", 1), text)


def _up_to(*markers: str) -> str:
    """Return a pattern for any text without these markers, which begin with "<". It takes linear time."""
    rests = "|".join(re.escape(marker[1:]) for marker in markers)
    return rf"[^<]*+(?:<(?!{rests})[^<]*+)*+"


def _format(
    call: str,
    starts: Sequence[str],
    ends: Sequence[str],
    *,
    around: tuple[str, str] = ("", ""),
    key: str | None = None,
    lines: bool = False,
) -> CallFormat:
    first, last = (re.escape(marker) for marker in around)
    section = rf"{first}\s*(?:{re.sub(r'[?]P<(name|json)>', '?:', call)}\s*)+{last}" if first else call
    return CallFormat(
        re.compile(section), re.compile(call), re.compile(key) if key else None, (*starts,), (*ends,), lines
    )


def _json_calls(start: str, end: str) -> CallFormat:
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    return _format(rf"{re.escape(start)}{_up_to(end)}{re.escape(end)}", [start], [end])


def _qwen_xml(start: str, end: str, lines: bool = True) -> CallFormat:
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>
    value = _up_to("</parameter>", "<parameter=", "</function>")
    call = (
        rf"{re.escape(start)}\s*<function=(?P<name>[^<>\s]+)>\s*"
        rf"(?:<parameter=[^<>]+>{value}</parameter>\s*)*</function>\s*{re.escape(end)}"
    )
    key = rf"<parameter=([^<>]+)>({value})</parameter>"
    plain = (
        rf"{re.escape(start)}\s*<function=([\w.:-]+)>\s*"
        rf"((?:<parameter=[\w.:-]+>[^<]*+</parameter>\s*+)*+)</function>\s*{re.escape(end)}"
    )
    found = _format(call, [start, "<function="], [end, "</function>"], key=key, lines=lines)
    return replace(found, plain=re.compile(plain))


def _glm() -> CallFormat:
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>
    value = _up_to("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
    key = r"[^<>\s]+"
    pair = r"<arg_key>\s*{}\s*</arg_key>\s*<arg_value>{}</arg_value>".format
    call = rf"<tool_call>\s*(?P<name>[^<>\s]+)\s*(?:{pair(key, value)}\s*)*</tool_call>"
    return _format(call, ["<tool_call>"], ["</tool_call>"], key=pair(f"({key})", f"({value})"))


def _kimi() -> CallFormat:
    # One section of <|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{...}<|tool_call_end|>
    part = "<|tool_call_{}|>".format
    around = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    begin, argument, end = (re.escape(part(name)) for name in ("begin", "argument_begin", "end"))
    body = _up_to(part("begin"), part("argument_begin"), part("end"), *around)
    call = rf"{begin}\s*(?:functions\.)?(?P<name>[^\s<>:]+):\d+\s*{argument}\s*(?=\{{)(?P<json>{body}){end}"
    return _format(call, [around[0], part("begin")], [around[1], part("end")], around=around)


def _deepseek(inside: str) -> CallFormat:
    # One section of calls; ``inside`` is what stands between a call's markers.
    begin, end, separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    # vLLM's pattern for these formats stops at a line break, so the JSON is on one line.
    name, arguments = r"(?P<name>[^\s<>]+)", rf"(?!\s*```){_up_to(begin, end, separator, *around)}"
    call = begin + inside.format(sep=separator, name=name, arguments=arguments) + end
    return _format(call, [around[0], begin], [around[1], end], around=around)


def _minimax() -> CallFormat:
    # One section of <invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>
    value = _up_to("</parameter>", "<parameter name=", "</invoke>", "<invoke name=", "</minimax:tool_call>")
    parameter = '<parameter name="{}">{}</parameter>'.format
    call = rf'<invoke name="(?P<name>[^"<>]+)">\s*(?:{parameter("[^<>]+?", value)}\s*)*</invoke>'
    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    return _format(
        call,
        [around[0], "<invoke name="],
        [around[1], "</invoke>"],
        around=around,
        key=parameter('([^"<>]+)', f"({value})"),
    )


_ARGUMENT = re.compile(r"<parameter=([^>]+)>([^<]*)</parameter>")


# The keys are the names of vLLM's tool parsers. docs/models.md says which model families use which format.
FORMATS: dict[str, Callable[[], CallFormat]] = {
    "deepseek_v3": lambda: _deepseek("function{sep}{name}\n```json\n{arguments}"),
    "deepseek_v31": lambda: _deepseek("{name}{sep}{arguments}"),
    "glm45": _glm,
    "glm47": _glm,
    "hermes": lambda: _json_calls("<tool_call>", "</tool_call>"),
    "kimi_k2": _kimi,
    "longcat": lambda: _json_calls("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": lambda: _qwen_xml("<tool_call>", "</tool_call>"),
    "minimax_m2": _minimax,
    "qwen3_coder": lambda: _qwen_xml("<tool_call>", "</tool_call>"),
    "qwen3_xml": lambda: _qwen_xml("<tool_call>", "</tool_call>"),
    "seed_oss": lambda: _qwen_xml("<seed:tool_call>", "</seed:tool_call>", lines=False),
}


class VllmReplyParser:
    """A VllmReplyParser parses with vLLM's ``tool_parser`` and, if the policy thinks aloud, its ``reasoning_parser``.

    Making one raises ValueError if vLLM or ``FORMATS`` does not know a name. If the tokenizer lacks tokens of the
    format, vLLM's own error is raised.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str | None, tokenizer: Any) -> None:
        if tool_parser not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"proxy.tool_parser: {tool_parser!r} is not a known format; known are: {known}")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self.spec = f"{tool_parser}+{reasoning_parser}" if reasoning_parser else tool_parser
        self._format = FORMATS[tool_parser]()
        self._make = ToolParserManager.get_tool_parser(tool_parser)
        self._begins_anew = getattr(self._make, "engine_based_streaming", False)
        self._request, self._tool = ChatCompletionRequest, ChatCompletionToolsParam
        # Every new parser asks for the vocabulary, a dict that a plain tokenizer would build each time.
        self._tokenizer: Any = get_cached_tokenizer(copy.copy(tokenizer))
        self._alone = threading.Lock()  # for event loops in other threads
        self._readers: OrderedDict[int, _Known] = OrderedDict()
        self._reader([])("")  # so that a tokenizer that does not fit is an error now, not at the first call
        self._thinking = _Thinking(reasoning_parser, self._tokenizer) if reasoning_parser else None

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        """Implement ReplyParser.parse."""
        thinking, rest = self._thinking.split(text, self._format.starts) if self._thinking else ("", text)
        # Anthropic's format has no blocks of only white space.
        before: list[Block] = [{"type": "thinking", "thinking": thinking}] if thinking.strip() else []
        if rest is None:  # the reply was cut while the policy was still thinking
            wanted = bool(tools) and any(start in thinking for start in self._format.starts)
            return ParsedReply(before or [{"type": "text", "text": text}], wanted)
        whole: list[Block] = [{"type": "text", "text": rest}] if rest.strip() or not before else []
        if not tools or not self._format.wants_call(rest):
            return ParsedReply([*before, *whole])
        try:
            return ParsedReply([*before, *self._read(rest, tools)])
        except Exception as error:  # vLLM's parsers may fail in any way on what a policy makes up
            log.debug("malformed tool call: %s: %s", type(error).__name__, error)
            return ParsedReply([*before, *whole], malformed=True)

    def _read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Block]:
        """Return text and calls in their order. Raises an exception of any type if the text is malformed."""
        with self._alone:
            strings = self._known(tools)[2]
        if (blocks := _read_plain(text, self._format, strings)) is not None:
            return blocks
        pieces: list[str] = []  # the texts around the sections, one more than there are sections
        calls: list[list[re.Match[str]]] = []
        end = 0
        for section in self._format.section.finditer(text):
            pieces.append(text[end : section.start()])
            calls.append(list(self._format.call.finditer(text, section.start(), section.end())))
            end = section.end()
        pieces.append(text[end:])
        if any(self._format.wants_call(piece) for piece in pieces):
            raise ValueError("it has parts of a call outside of whole calls")
        # If a marker is more than one token, a reply can be cut in the middle of the next call's marker.
        if any(pieces[-1].endswith(start[:n]) for start in self._format.starts for n in range(1, len(start))):
            raise ValueError("it ends with the beginning of a call")
        with self._alone:
            found = self._reader(tools)(self._format.shortened(text))
        written = [call for section in calls for call in section]
        if len(found) != len(written):
            raise ValueError(f"it has {len(written)} calls, but vLLM's parser reads {len(found)}")
        read = iter([self._block(call.function, source) for call, source in zip(found, written, strict=True)])
        blocks: list[Block] = []
        for piece, section in zip(pieces, [*calls, []], strict=True):
            if piece.strip():
                blocks.append({"type": "text", "text": piece})
            blocks.extend(next(read) for _ in section)
        return blocks

    def _block(self, function: Any, written: re.Match[str]) -> Block:
        """Make a block of one call as vLLM read it, after checking it against the text ``written``."""
        parts = written.groupdict()
        if not function.name or function.name != parts.get("name", function.name):
            raise ValueError(f"vLLM's parser reads the tool's name as {function.name!r}")
        # msgspec is stricter than the standard library: it refuses NaN, lone surrogates and numbers out of range.
        arguments = msgspec.json.decode(parts.get("json", function.arguments))
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are not a JSON object")
        if not storable(arguments):
            raise ValueError("its arguments nest too deep, or have an integer of more than 64 bits")
        if self._format.key:
            values = self._format.values(written.group())
            if len(dict(values)) != len(values) or dict(values).keys() != arguments.keys():
                raise ValueError(f"arguments {[key for key, _ in values]} are read as {list(arguments)}")
            # vLLM 0.24's parsers strip white space: an edit would begin in the wrong column.
            arguments |= {key: value for key, value in values if isinstance(arguments[key], str)}
        return {"type": "tool_use", "name": function.name, "input": arguments}

    def _reader(self, tools: Sequence[dict[str, Any]]) -> Callable[[str], list[Any]]:
        """Return vLLM's parser for this list of tools, as a function from a text to its tool calls."""
        return self._known(tools)[1]

    def _known(self, tools: Sequence[dict[str, Any]]) -> _Known:
        """Return a list of tools, vLLM's parser for it, and what ``_strings`` says of it."""
        # Lists are compared by identity: a session passes the same one with every reply, and it is 50 KB of schemas.
        kept = self._readers.pop(id(tools), None)
        if kept is None:
            params: list[Any] = [self._tool.model_validate(tool) for tool in tools]
            request = self._request(model="", messages=[], tools=params or None)

            # Some parsers keep state, so that every text needs a new one. Those on vLLM's parser engine begin anew with
            # each text, and making one costs as much as a call.
            again = _unstreamed(self._make(self._tokenizer, params)) if self._begins_anew else None

            def reader(text: str) -> list[Any]:
                return (again or self._make(self._tokenizer, params)).extract_tool_calls(text, request).tool_calls

            kept = tools, reader, _strings(tools)
        self._readers[id(tools)] = kept
        if len(self._readers) > _KEPT:
            self._readers.popitem(last=False)
        return kept


_Known = tuple[Sequence[Any], Callable[[str], list[Any]], dict[str, frozenset[str]]]


def _strings(tools: Sequence[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Return, by the name of each tool, the arguments that its schema allows to be strings and nothing else."""
    names = Counter(tool["function"]["name"] for tool in tools)
    found = dict[str, frozenset[str]]()
    for tool in tools:
        name, properties = tool["function"]["name"], tool["function"]["parameters"].get("properties")
        if names[name] == 1 and isinstance(properties, dict):
            found[name] = frozenset(key for key, schema in properties.items() if _is_string(schema))
    return found


def _is_string(schema: Any) -> bool:
    """Tell whether a schema is one of strings, without a key from which vLLM might derive another type."""
    return isinstance(schema, dict) and schema.get("type") == "string" and schema.keys().isdisjoint(_TYPED)


_TYPED = frozenset({"enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref"})


def _read_plain(text: str, format: CallFormat, strings: dict[str, frozenset[str]]) -> list[Block] | None:
    """Return the blocks that ``VllmReplyParser._read`` would return, or None if only vLLM's parser (0.2 ms) can tell.

    The blocks are certain if every "<" belongs to a whole call, and every argument is a string, according to its tool's
    schema. (Tests compare both ways.) Most calls of a policy are like that: commands, paths, patterns.
    """
    if format.plain is None:
        return None
    blocks: list[Block] = []
    end = 0
    for call in format.plain.finditer(text):
        piece = text[end : call.start()]
        name, written = call.groups()
        pairs = _ARGUMENT.findall(written)
        given = {key: format.value(value) for key, value in pairs}
        certain = "<" not in piece and len(given) == len(pairs) and strings.get(name, _NONE) >= given.keys()
        # Some versions of vLLM read "null" as no value, whatever the schema says.
        if not certain or name not in strings or any(value.strip().lower() == "null" for value in given.values()):
            return None
        if piece.strip():
            blocks.append({"type": "text", "text": piece})
        blocks.append({"type": "tool_use", "name": name, "input": given})
        end = call.end()
    rest = text[end:]
    if "<" in rest or (not text.isascii() and _SURROGATE.search(text)):  # which JSON cannot hold
        return None
    if rest.strip():
        blocks.append({"type": "text", "text": rest})
    return blocks


_NONE = frozenset[str]()
_SURROGATE = re.compile("[\ud800-\udfff]")


def _unstreamed(parser: Any) -> Any:
    """Keep one of vLLM's parsers from making what a streaming client would be sent; return it.

    The parser would convert all arguments of a call once more with each chunk of them, and drop the result: the calls
    are made from the whole text. vLLM sets the switch once per format; nobody else uses this parser.
    """
    engine = getattr(parser, "_parser_engine", None)
    if hasattr(engine, "_stream_arg_deltas"):  # not every version has it
        engine._stream_arg_deltas = False
    return parser


class _Thinking:
    """This splits thinking from the rest of a reply, by the markers of vLLM's reasoning parser ``name``."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager

        try:
            self._parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        except KeyError as error:
            known = ", ".join(ReasoningParserManager.list_registered())
            raise ValueError(f"proxy.reasoning_parser: vLLM has none named {name!r}; known are: {known}") from error
        start, end = self._parser.reasoning_start_str, self._parser.reasoning_end_str
        if not start or not end:
            raise ValueError(f"proxy.reasoning_parser: {name} has no markers around thinking; choose another one")
        self._start, self._end = start, end
        self._request = ChatCompletionRequest(model="", messages=[])
        self._opened = _opens(tokenizer, start, end)

    def split(self, text: str, call_starts: Sequence[str]) -> tuple[str, str | None]:
        """Return the thinking and what comes after it, which is None if the thinking has no end.

        Thinking is opened either by the generation prompt or by the policy, at the start of its reply.
        """
        body = text.lstrip()
        if body.startswith(self._start):
            body = body[len(self._start) :]
        elif self._opened:
            body = text
        else:
            return "", text
        thinking, end, rest = body.partition(self._end)
        if end:
            return thinking, rest
        if any(start in body for start in call_starts):
            # In some families a call ends the thinking; vLLM's parser knows which.
            content = self._parser.extract_reasoning(text, self._request)[1]
            if content and body.endswith(content):
                return body[: -len(content)], content
        return thinking, None


def _opens(tokenizer: Any, start: str, end: str) -> bool:
    """Tell whether the generation prompt opens the thinking and leaves it open."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    return prompt.rfind(start) > prompt.rfind(end)
