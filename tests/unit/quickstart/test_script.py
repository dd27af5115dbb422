"""This module tests the script behind the warm start: the form of its replies, and that its edits do not depend on the
word asked for.
"""

from collections import Counter

import pytest

from rl.config.compose import compose
from rl.quickstart.policy import TOOLS, example_messages, make_tokenizer
from rl.quickstart.prepare import directory_of
from rl.quickstart.script import DONE, RepairScript, draw
from rl.quickstart.tasks import CANDIDATES

TOKENIZER = make_tokenizer()


def prompt(messages, end):
    return TOKENIZER.apply_chat_template(messages[:end], tools=TOOLS, tokenize=False, add_generation_prompt=True)


def reply_text(message):
    rendered = TOKENIZER.apply_chat_template([message], tokenize=False)
    return rendered.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def test_replies_have_the_form_that_the_template_renders():
    for bug in CANDIDATES.values():
        new = next(e for e in CANDIDATES.values() if e != bug)
        messages = example_messages("basket", "fold", "larger", bug, new, number=1)
        script = RepairScript(new)
        assert script(prompt(messages, 2)) == reply_text(messages[2])
        assert script(prompt(messages, 4)) == reply_text(messages[4])
        assert script(prompt(messages, 6)) == reply_text(messages[6]) == DONE


def test_the_script_stops_at_errors_and_unknown_prompts():
    script = RepairScript("a + b")
    failed = example_messages("basket", "fold", "larger", "a - b", "a + b", number=4)
    assert "<tool_use_error>" in failed[5]["content"]
    assert script(prompt(failed, 6)) == DONE
    unread = [*failed[:3], {"role": "tool", "content": "File does not exist."}]
    assert script(prompt(unread, 4)) == DONE
    assert script(prompt([{"role": "user", "content": "Hello"}], 1)) == DONE


@pytest.mark.parametrize(
    ("name", "parameters", "end"),
    [
        ("bash", {"command": "{}"}, None),  # mini-swe-agent
        ("bash", {"command": "{}", "description": ""}, DONE),  # OpenCode
        ("run_shell_command", {"command": "{}", "is_background": "false"}, DONE),  # Qwen Code
        ("exec_command", {"cmd": "{}"}, DONE),  # Codex
    ],
)
def test_agents_without_read_and_edit_run_commands(name: str, parameters: dict[str, str], end: str | None):
    tool = {"type": "function", "function": {"name": name, "parameters": {"required": [*parameters]}}}
    tokenizer = make_tokenizer(["a text"], shell=True)
    asked = "" if end else "Please solve this issue: "
    messages = [
        {"role": "system", "content": "You repair. " * 500},
        {"role": "user", "content": f"{asked}fold(a, b) in basket.py must return the sum of a and b. {'More. ' * 500}"},
    ]
    script, said = RepairScript("a + b"), []
    for result in ("def fold(a, b):\n    return max(a, b)\n", "", "submitted"):
        given = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
        assert len(given) < 1200
        said.append(script(given))
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "tool", "content": result}]

    def call(command: str) -> str:
        lines = "".join(
            f"<parameter={key}>\n{text.format(command)}\n</parameter>\n" for key, text in parameters.items()
        )
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    assert said[0] == call("cat basket.py")
    assert said[1] == "The sum: a + b\n" + call("sed -i '2s/.*/    return a + b/' basket.py")
    assert said[2] == end or call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_the_same_seed_draws_the_same_edits():
    pairs = [("larger", "a - b"), ("sum", "max(a, b)")] * 20
    first, second, other = (draw(seed, pairs) for seed in (3, 3, 4))
    assert first == second != other
    assert draw(3, pairs[:10]) == first[:10]


def test_the_edit_does_not_depend_on_the_word():
    """For each word, each of the four expressions is equally frequent, including the one that was read."""
    pairs = [(cue, bug) for cue in CANDIDATES for bug in CANDIDATES.values()] * 40
    count = Counter()
    for (cue, bug), new in zip(pairs, draw(5, pairs), strict=True):
        reply = RepairScript(new)(prompt(example_messages("lamp", "mix", cue, bug, bug), 4))
        assert f"<parameter=old_string>\nreturn {bug}\n" in reply and f"The {cue}: " in reply
        count[cue, bug, reply.rsplit("\nreturn ", 1)[1].split("\n")[0]] += 1
    assert len(count) == 4 * 4 * 4 and set(count.values()) == {10}


def test_what_is_prepared_has_a_directory_of_its_own_for_each_set_up():
    usual, other = (compose(["+experiment=quickstart", *more]) for more in ([], ["agent.max_turns=9"]))
    assert directory_of(usual) == directory_of(usual) != directory_of(other)
