"""These checks prove that the sampled tokens say what was sent, and that turns are closed (check 4 of
``rollout.audit``)."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.audit.tokens import SEALS
from rollout.reading import FormatReading
from rollout.records import Record


def audit_text(record: Record, tokenizer: Any, reading: FormatReading) -> Iterator[str]:
    """Yield the findings of check 4. Version 1 kept blocks other than those sampled; only its text is checked."""
    malformed = 0
    for i, node in enumerate(record.nodes):
        if node.logprobs is None:
            continue
        ids = array("i", node.ids).tolist()
        text = tokenizer.decode(ids[:-1] if node.ended else ids, skip_special_tokens=False)
        if text != node.text:
            yield f"node {i}: the sampled ids decode to {text!r}, but the recorded text is {node.text!r}"
            continue
        if node.stop_sequence is not None:
            text = text[: text.find(node.stop_sequence)]
        sent = [{k: v for k, v in block.items() if k != "id"} for block in node.blocks]
        if record.version > 1 and not reading.agrees(text, sent, node.tools_allowed):
            yield f"node {i}: the sampled text does not say the blocks that were sent"
        malformed += reading.malformed(text, sent, node.tools_allowed)
    counted = record.counters.get("malformed_calls", 0)
    if record.version >= SEALS and counted != malformed:
        yield f"{malformed} replies have parts of calls that were not sent as such, but {counted} were counted"


def audit_turns(record: Record, closing: int) -> Iterator[str]:
    """Yield the turns that are not closed (check 4). ``closing``: the id that closes one (see ``closing_of``)."""
    for i, node in enumerate(record.nodes):
        if node.logprobs is None and node.parent >= 0:
            around = array("i", record.nodes[node.parent].ids[-4:] + node.ids[:4])
            if closing not in around:
                yield f"node {i}: the turn before it is not closed by {closing}, as the chat template closes it"


def tokenizer_of(model: str) -> Any:
    """Return a tokenizer that decodes the ids of the model in a directory. Raises FileNotFoundError.

    Where tokenizer.json has all tokens, the ``tokenizers`` library is enough; transformers would do no more with it,
    and imports torch first.
    """
    place = Path(model)
    if not place.is_dir():
        raise FileNotFoundError(f"the policy's tokenizer is not at {model}; say with --model where it is")
    whole, options = place / "tokenizer.json", place / "tokenizer_config.json"
    told = json.loads(options.read_text()) if options.is_file() else {}
    if whole.is_file() and not told.get("clean_up_tokenization_spaces"):
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(whole))
        added = told.get("added_tokens_decoder") or {}
        if all(found.id_to_token(int(number)) == one["content"] for number, one in added.items()):
            return found
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def closing_of(model: Path, tokenizer: Any) -> int | None:
    """Return the id with which the chat template in a model's directory closes a turn of the assistant.

    None: it has no template, or one that closes turns with no control token. Raises ValueError if it fails.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file, options = model / "chat_template.jinja", model / "tokenizer_config.json"
    told = json.loads(options.read_text()) if options.is_file() else {}
    template = file.read_text() if file.is_file() else told.get("chat_template")
    if not template:
        return None
    # As in transformers, which imports torch. A block "generation" is what a template for training trains.
    template = re.sub(r"({%-?\s*)generation\b", r"\1if true", str(template))
    template = re.sub(r"({%-?\s*)endgeneration\b", r"\1endif", template)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zq7"}]
    names = {
        key: one["content"] if isinstance(one, dict) else one for key, one in told.items() if key.endswith("_token")
    }
    try:
        text = environment.from_string(template).render(messages=said, strftime_now=time.strftime, **names)
        rest = text.split("zq7")[1]
    except Exception as error:  # a template may fail in any way
        raise ValueError(f"{model}: the chat template fails: {error}") from error
    encoded = tokenizer.encode(rest, add_special_tokens=False)
    ids = getattr(encoded, "ids", encoded)
    known = getattr(tokenizer, "get_added_tokens_decoder", lambda: tokenizer.added_tokens_decoder)()
    return ids[0] if ids and ids[0] in known else None
