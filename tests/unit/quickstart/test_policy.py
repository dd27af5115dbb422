"""This module tests the quickstart's policy: tokenizer, template, reproducibility, and whether verl, vLLM and
transformers accept it.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.quickstart.policy import EDITED, ERRORS, TOOLS, example_messages, make_policy, make_tokenizer
from rl.quickstart.tasks import CANDIDATES, FUNCTIONS, MODULES
from rollout.proxy.render import ChatTemplateRenderer
from tests.kit import make_parser

MESSAGES = example_messages("basket", "fold", "larger", "a - b", "max(a, b)", number=1)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("policy") / "model"
    make_policy(out, seed=1)
    return out


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_tokenizer_encodes_any_text_without_loss(tokenizer):
    @settings(max_examples=300)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert tokenizer.decode(encode(tokenizer, text)) == text

    check()
    every_byte = "".join(map(chr, range(0x800))) + "".join(map(chr, range(0x800, 0x110000, 0x7F1)))
    text = every_byte.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_tags_names_and_expressions_are_single_tokens(tokenizer):
    newline = encode(tokenizer, "\n")
    assert len(newline) == 1
    # wherever it stands
    assert encode(tokenizer, "a)\n\n \n").count(newline[0]) == 3
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_response>", "</think>"):
        assert len(encode(tokenizer, text)) == 1
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    ids = encode(tokenizer, "<tool_call>x</tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"
    words = [*(f" {word}" for word in (*MODULES, *CANDIDATES)), *(f" {word}:" for word in CANDIDATES)]
    expressions = [f" {expression}" for expression in CANDIDATES.values()]
    for piece in (*words, *expressions, *MODULES, *(f"{name}(a, b)" for name in FUNCTIONS)):
        assert len(encode(tokenizer, piece)) == 1, piece


def test_the_same_seed_gives_the_same_bytes_and_only_weights_depend_on_it(tokenizer, model_dir, tmp_path):
    make_policy(tmp_path / "again", seed=1)
    make_policy(tmp_path / "other", seed=2)
    for file in model_dir.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
        same = (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()
        assert same == (file.name != "model.safetensors"), file.name


def test_its_shapes_suit_kernels_for_gpus(model_dir, tmp_path):
    """scale=gpu: heads of 64, and all else in multiples of 64."""
    from transformers import AutoTokenizer

    make_policy(tmp_path / "wide", seed=1, experts=4, head_dim=64, multiple=64)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["head_dim"] == 64
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    assert {config[width] % 64 for width in widths} == {0}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "wide")) == config["vocab_size"]
    assert json.loads((model_dir / "config.json").read_text())["head_dim"] == 32


def test_transformers_loads_the_policy(tokenizer, model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model_dir)
    rendered = loaded.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert encode(loaded, rendered) == encode(tokenizer, rendered)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.config.model_type == "qwen3" and not model.config.tie_word_embeddings
    assert model.config.vocab_size == len(loaded) and model.config.max_position_embeddings >= 8192
    assert model.generation_config.eos_token_id == loaded.eos_token_id == model.config.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 5e6


def test_an_episode_is_short(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert len(encode(tokenizer, text)) < 300


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_appending_messages_gives_the_same_tokens_as_rendering_at_once(tokenizer, tools):
    """verl's Qwen builder makes of appended messages what the template makes of the whole chat."""
    renderer = ChatTemplateRenderer(tokenizer, "qwen3")
    messages = [
        *MESSAGES,
        {"role": "system", "content": "a reminder"},
        {"role": "user", "content": "again"},
        *[{**message, "content": "one\n"} for message in MESSAGES[2:3]],
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second\n\n"},
        {"role": "user", "content": " and more"},
    ]

    def whole(end):
        rendered = tokenizer.apply_chat_template(
            messages[:end], tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return encode(tokenizer, rendered)

    ids = renderer.start(messages[:2], tools)
    assert ids == whole(2)
    start = 2
    while start < len(messages):
        reply = tokenizer.apply_chat_template([messages[start]], tokenize=False)
        ids += encode(tokenizer, reply.removeprefix("<|im_start|>assistant\n").removesuffix("\n"))
        end = start + 1
        while end < len(messages) and messages[end]["role"] != "assistant":
            end += 1
        if end == start + 1:
            break
        ids += renderer.extend(ids[-8:], True, messages[start + 1 : end])
        assert ids == whole(end), tokenizer.decode(ids)
        start = end
    assert start == len(messages)


def test_assistant_messages_can_be_appended_as_context(tokenizer):
    renderer = ChatTemplateRenderer(tokenizer, "qwen3")
    ids = renderer.start(MESSAGES[:2], TOOLS)
    end = tokenizer.eos_token_id
    added = renderer.extend([*ids, end], True, [*MESSAGES[2:4]])
    whole = tokenizer.apply_chat_template(MESSAGES[2:4], tokenize=False, add_generation_prompt=True)
    assert added == encode(tokenizer, "\n" + whole)


def test_the_template_shows_tools_as_signatures_and_accepts_text_blocks(tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}]
    bare = [{"type": "function", "function": {"name": "Ping", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=bare, tokenize=False)
    assert text == "<|im_start|>system\n# Tools\nPing()<|im_end|>\n<|im_start|>user\none two<|im_end|>\n"
    text = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert "\n# Tools\nEdit(file_path, old_string, new_string)\nRead(file_path)<|im_end|>\n" in text
    assert EDITED.format(file="basket.py") in text and "{new}" in ERRORS[0]


@pytest.mark.parametrize("new", [*(f"return {e}" for e in CANDIDATES.values()), "two\n    lines\n", "\n x < 1", " "])
def test_the_rendered_calls_are_parsed(tokenizer, new):
    wanted = {"file_path": "basket.py", "old_string": "return a - b", "new_string": new, "replace_all": False}
    call = {"type": "function", "function": {"name": "Edit", "arguments": wanted}}
    message = {"role": "assistant", "content": "The larger.", "tool_calls": [call]}
    rendered = tokenizer.apply_chat_template([message], tokenize=False)
    text = rendered.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    said, used = make_parser("qwen3_coder", tokenizer).parse(text, TOOLS).blocks
    assert said["text"].strip() == "The larger."
    assert used == {"type": "tool_use", "name": "Edit", "input": wanted}
