"""What an Encoder returns is what the tokenizer returns for the whole text, whatever it remembers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl.quickstart.policy import make_tokenizer
from rollout.proxy import encode
from rollout.proxy.encode import Encoder
from rollout.proxy.render import ChatTemplateRenderer

CONTROL = ("<|im_start|>", "<|im_end|>", "<|im_", "<think>")
CORPUS = [
    "def f(x):\n    return x + 1\n\n\n",
    "the quick brown fox, over the dog. ",
    "  <tags> and [brackets]\t ",
] * 9


def trained(pre: Any, normalizer: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """Train a BPE whose merges go over blanks and line breaks, if the pre-tokenizer lets them."""
    tokenizer = Tokenizer(models.BPE(unk_token="?", byte_fallback=False))
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(set("".join(CORPUS) + "?▁<|im_start>enthk 🙂é") | set(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    added = [AddedToken(text, normalized=False, special=True, **options) for text in CONTROL]
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


TOKENIZERS = {
    "quickstart": make_tokenizer(),
    "byte level": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "normalized": trained(
        pre_tokenizers.Whitespace(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "stripping": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), lstrip=True, rstrip=True),
}
parts = st.one_of(st.sampled_from(CONTROL), st.sampled_from(CORPUS), st.text("ab \n<|é🙂", max_size=6))
texts = st.lists(parts, max_size=12).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(heads=st.lists(texts, min_size=1, max_size=3), rests=st.lists(texts, min_size=1, max_size=4))
def test_a_prompt_has_the_ids_of_the_whole_text(name: str, heads: list[str], rests: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_SHORT", 3)
        patch.setattr(encode, "_KEPT", 2)
        encoder = Encoder(tokenizer)
        assert encoder._backend is not None
        for text in [head + rest for rest in rests for head in heads]:
            wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert encoder.encode(text) == wanted and encoder.encode_prompt(text) == wanted
            for head in filter(lambda head: encoder.can_cut(text, head), heads):
                assert encoder.encode(head) + encoder.encode(text[len(head) :]) == wanted
        assert (encoder._cut is None) == (name == "stripping")  # where it may cut, it is right to


def test_a_head_is_encoded_once_for_all_prompts() -> None:
    tokenizer = make_tokenizer()
    renderer = ChatTemplateRenderer(tokenizer, "qwen3")
    encoded: list[str] = []
    whole, renderer._encoder.encode = renderer._encoder.encode, lambda text: encoded.append(text) or whole(text)
    system = {"role": "system", "content": "You fix bugs. " * 1000}
    for number in range(3):
        talk = [system, {"role": "user", "content": f"task {number}"}]
        wanted = tokenizer.apply_chat_template(talk, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert renderer.start(talk, []) == wanted
    assert [len(text) > 10_000 for text in encoded] == [True, False, False, False]


WITH_PREFIX = ChatTemplateRenderer(make_tokenizer(), "qwen3")
WHOLE = ChatTemplateRenderer(make_tokenizer(), "qwen3")
WHOLE.builder.render_delta_token_id = WHOLE._by_comparison
said = st.one_of(texts, st.text(max_size=30), st.just("x" * 5000))
later = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), said)
result = st.builds(lambda content: {"role": "tool", "tool_call_id": "t", "name": "Do", "content": content}, said)


@given(st.lists(st.one_of(later, result), min_size=1, max_size=4), st.booleans())
def test_what_a_turn_adds_has_the_ids_that_verl_finds_by_comparison(messages: list[Any], ended: bool) -> None:
    end = [WHOLE.tokenizer.eos_token_id]
    assert WITH_PREFIX.extend(end, ended, messages) == WHOLE.extend(end, ended, messages)


def test_a_tokenizer_of_another_kind_is_called_itself() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text: str, **options: Any) -> Any:
            return super()._encode_plus(text.upper(), **options)

    tokenizer = Own(tokenizer_object=make_tokenizer().backend_tokenizer)
    encoder = Encoder(tokenizer)
    assert encoder._backend is None
    assert encoder.encode("def") == encoder.encode_prompt("def") == tokenizer.encode("DEF") != tokenizer.encode("x")
