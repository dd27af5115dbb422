"""A tool parser that does not fit the model's chat template is refused before anything is played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from rl.checks.model import check_family
from rl.config.compose import ConfigError
from rl.plan import plan
from rl.plan.model import load_config, turn_notes
from rl.quickstart.policy import make_tokenizer
from rollout.proxy.fits import check_fits
from rollout.proxy.parsers import FORMATS
from rollout.proxy.render import ChatTemplateRenderer, end_ids, end_note, generation_config, turn_end, turn_ends
from rollout.proxy.standalone import ProxyOptions, load_policy
from tests.check_kit import composed, good_config
from tests.kit import saved_again
from tests.unit.proxy.test_render import glm


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


# How published templates of the families write a call (TRL 1.16 carries most of them); "%s" is the name of the tool.
CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": {{ a | tojson }}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=%s>\n<parameter=text>\n{{ a.text }}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>%s\n<arg_key>text</arg_key>\n<arg_value>{{ a.text }}</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n{{ a + '' }}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>"
    "{{ a | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="%s">\n<parameter name="text">{{ a.text }}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=%s>\n<parameter=text>{{ a.text }}</parameter>\n</function>\n"
    "</seed:tool_call>",
    "longcat": '<longcat_tool_call>{"name": "%s", "arguments": {{ a | tojson }}}</longcat_tool_call>',
}
SAME = {"qwen3_coder": {"qwen3_coder", "qwen3_xml", "mimo"}, "glm45": {"glm45", "glm47"}}
LLAMA = '{"name": "%s", "parameters": {{ a | tojson }}}'


def writing(call: str, between: str = "\n") -> ChatTemplateRenderer:
    """A renderer whose template writes calls so."""
    tokenizer = make_tokenizer(["a text"])
    said = call.replace("%s", "{{ c.function.name }}")
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}" + said + "{% endfor %}<|im_end|>" + between + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return ChatTemplateRenderer(tokenizer, "qwen3")


@pytest.mark.parametrize("family", CALLS)
def test_the_parsers_of_a_family_fit_its_template_and_no_others(family: str) -> None:
    renderer, fitting = writing(CALLS[family]), set()
    for name in FORMATS:
        try:
            check_fits(renderer, name, any_family=False)
            fitting.add(name)
        except ValueError as error:
            assert f"proxy.tool_parser={name} does not read calls" in str(error)
            assert family in str(error).partition("; take ")[2]
        check_fits(renderer, name, any_family=True)
    assert fitting == SAME.get(family, {family})


def test_a_format_that_nobody_reads_is_refused_and_a_template_without_calls_or_tools() -> None:
    with pytest.raises(ValueError, match="no known parser does"):
        check_fits(writing(LLAMA), "hermes", any_family=False)
    with pytest.raises(ValueError, match="a first prompt with a call: the model's chat template leaves out the call"):
        check_fits(writing(""), "hermes", any_family=False)
    tokenizer = make_tokenizer(["a text"])
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(ValueError, match="a first prompt: the model's chat template leaves out the tools"):
        check_fits(ChatTemplateRenderer(tokenizer, "llama"), "hermes", any_family=False)
    tokenizer.chat_template = "{% for tool in tools %}{% endfor %}{{ tools.none.x }}"
    with pytest.raises(ValueError, match="the model's chat template fails: "):
        ChatTemplateRenderer(tokenizer, "llama")


def test_what_stands_between_turns_must_be_what_the_template_writes(caplog: pytest.LogCaptureFixture) -> None:
    renderer = writing(CALLS["hermes"], between="")  # the family's builder writes a line break
    found = (
        r"after a call, its result: the proxy writes .*_end\|>\\n<.*, the model's chat template .*_end\|><\|im_start"
    )
    with pytest.raises(ValueError, match=found):
        check_fits(renderer, "hermes", any_family=False)
    assert not caplog.records
    check_fits(renderer, "hermes", any_family=True)
    assert any("after a cut reply, the user's text: " in line for line in caplog.messages)


def test_a_template_that_fails_is_refused() -> None:
    """llama.cpp's templates of Kimi-K2 change lists, which transformers forbids."""
    renderer = writing("{% set x = [] %}{% set _ = x.append(1) %}%s")
    with pytest.raises(ValueError, match=r"a first prompt with a call: .* 'append' of 'list' object is unsafe"):
        check_fits(renderer, "kimi_k2", any_family=False)


def test_every_start_looks(config: DictConfig, tmp_path: Path) -> None:
    """Training, whose workers would find it late; the proxy. Evaluations and collections load policies as the proxy."""
    model = Path(config.actor_rollout_ref.model.path)
    make_tokenizer(["a text"]).save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config.proxy.any_family, config.proxy.tool_parser = False, "qwen3_coder"
    check_family(config)
    config.proxy.tool_parser = "hermes"
    with pytest.raises(ConfigError, match=rf"{model}: proxy.tool_parser=hermes .* take mimo or qwen3_coder"):
        check_family(config)
    with pytest.raises(ValueError, match=r"proxy\.tool_parser=hermes"):
        load_policy(ProxyOptions("http://127.0.0.1:9", str(model), "hermes"))


@pytest.mark.parametrize("by", ["only its generation_config.json names", "no file of it names"])
def test_a_directory_whose_end_of_sequence_ends_no_turn_is_told_by_plan_and_start(
    by: str, config: DictConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Base models, and those that were converted. Replies end as the template says, and the engine is told."""
    model = Path(config.actor_rollout_ref.model.path)
    tokenizer = saved_again(make_tokenizer(["a text"]), model)
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    generation = {"eos_token_id": [eos, end] if "only" in by else eos}
    (model / "generation_config.json").write_text(json.dumps(generation))
    (line,) = turn_notes(str(model))
    assert "'<|endoftext|>'" in line and f"ends a turn with '<|im_end|>', which {by}: replies end there" in line
    assert tokenizer.eos_token_id == eos and end_ids(tokenizer, generation_config(str(model))) == {eos, end}
    assert caplog.messages == [line]
    gpus = composed("+experiment=qwen3_8b", f"actor_rollout_ref.model.path={model}")
    assert plan(gpus, load_config("Qwen/Qwen3-8B")).warnings[-1] == line


def test_a_directory_that_names_the_end_of_a_turn_or_has_no_template_is_not_told_of(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["a text"])
    tokenizer.save_pretrained(tmp_path)
    assert turn_notes(str(tmp_path)) == [] and turn_end(tokenizer) == tokenizer.eos_token_id
    assert end_ids(tokenizer, {"eos_token_id": [7]}) == {7, tokenizer.eos_token_id}
    (tmp_path / "chat_template.jinja").write_text("{{ none.x.y }}")
    assert turn_notes(str(tmp_path)) == turn_notes(str(tmp_path / "none")) == turn_notes(None) == []
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert "ends a turn with no control token" in end_note(tokenizer, {}) and turn_ends(tokenizer) == []


def test_a_turn_that_the_next_role_ends_ends_with_each_role_that_may_come() -> None:
    tokenizer = glm()
    roles = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert turn_ends(tokenizer) == roles and turn_end(tokenizer) == tokenizer.eos_token_id
    assert end_ids(tokenizer, {}) == {*roles, tokenizer.eos_token_id}
    assert "'<|user|>' or '<|observation|>', which no file of it names" in end_note(tokenizer, {})
    assert "which only its gen" in end_note(tokenizer, {"eos_token_id": [tokenizer.eos_token_id, *roles]})
