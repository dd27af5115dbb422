"""This module tests the expert that policies are warm-started on: calls in a template's own form, edits of gold
patches, episodes in a real work tree.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.task import Task
from rl.config.compose import ConfigError
from rl.data.make.edits import patch
from rl.data.make.swaps import swaps
from rl.quickstart.policy import make_tokenizer
from rl.traces.collect.expert import DONE, CannotPlayError, Edit, Expert, Form, Habits, gold_edits, playable
from rollout.proxy.render import ChatTemplateRenderer
from tests.datasets import snapshot_row
from tests.kit import make_parser, saved_again
from tests.unit.data.test_functions import BROKEN
from tests.unit.data.test_functions import SOURCE as GOLD


def _tool(name: str, **types: str) -> dict[str, Any]:
    properties = {parameter: {"type": type_} for parameter, type_ in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [
    _tool("Bash", command="string"),
    _tool("Edit", file_path="string", old_string="string", new_string="string"),
    _tool("Read", file_path="string", offset="integer", limit="integer"),
]

# As Qwen's templates: of Qwen2.5, of Qwen3, which leaves thoughts of former calls out, and of Qwen3.5, whose prompts
# begin one. THOUGHT stands at the start of the assistant's turns.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}THOUGHT{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPEN{% endif %}"
)
THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
SOMETIMES = f"{{% if loop.last or m.reasoning_content %}}{THOUGHT}{{% endif %}}"
TEMPLATES = {
    "hermes": CHATML.replace("THOUGHT", "").replace("OPEN", ""),
    "hermes, thoughts are left out": CHATML.replace("THOUGHT", SOMETIMES).replace("OPEN", ""),
    "hermes, prompts begin a thought": CHATML.replace("THOUGHT", THOUGHT).replace("OPEN", "<think>\n"),
}
PARSERS = {"quickstart": "qwen3_coder", "hermes": "hermes"}
FORMS = ["quickstart", *TEMPLATES]
STATEMENT = "clamp(0) gives -1."
ASK = [{"role": "system", "content": "Repair."}, {"role": "user", "content": f"\n{STATEMENT}\n"}]


class Talk:
    """A conversation of token ids, as the proxy makes it, and the parser of its replies."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        tokenizer = make_tokenizer(["a text"])
        tokenizer.chat_template = TEMPLATES.get(name, tokenizer.chat_template)
        self.tokenizer = saved_again(tokenizer, directory) if directory else tokenizer
        self.renderer = ChatTemplateRenderer(self.tokenizer, "qwen3")
        spec = PARSERS["quickstart" if name == "quickstart" else "hermes"]
        self._parser = make_parser(f"{spec}+deepseek_r1" if "thought" in name else spec, self.tokenizer)
        self.form = Form(self.renderer)
        self.begin()

    def begin(self) -> None:
        self.ids = self.renderer.start(ASK, TOOLS)

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)

    def reply(self, text: str) -> list[dict[str, Any]]:
        """Add a reply, and return its blocks."""
        self.ids += [*self.tokenizer.encode(text, add_special_tokens=False), *self.renderer.closing]
        parsed = self._parser.parse(text, TOOLS)
        assert not parsed.malformed
        blocks = [block | {"text": block["text"].strip()} if "text" in block else block for block in parsed.blocks]
        return [block for block in blocks if block["type"] == "tool_use" or block.get("text")]

    def told(self, result: str, *more: str) -> None:
        """Add what a call gave, and more texts of the user."""
        messages = [{"role": "tool", "tool_call_id": "toolu_1", "content": result}]
        messages += [{"role": "user", "content": text} for text in more]
        self.ids += self.renderer.extend(self.ids[-16:], True, messages)


TALKS = {name: Talk(name) for name in FORMS}


@pytest.fixture(params=FORMS)
def talk(request: pytest.FixtureRequest) -> Talk:
    talk = TALKS[request.param]
    talk.begin()
    return talk


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("Bash", {"command": "git checkout -q a.py; sed -i 's/ < low/ <= low/' module.py"}),
    ("Bash", {"command": "python3 - <<'END'\nprint(\"\\n\", '<x>')\nEND"}),
    ("Edit", {"file_path": "a\n b", "old_string": "    x = 1\n", "new_string": "\n\n\tx = {'a': \"é\"}\n\n"}),
    ("Read", {"file_path": "a.py", "offset": 301, "limit": 25}),
]


def test_a_call_is_read_as_it_was_written(talk: Talk) -> None:
    for name, given_ in CALLS:
        assert talk.reply(talk.form.call(name, **given_)) == [{"type": "tool_use", "name": name, "input": given_}]
    assert talk.reply(talk.form.done) == [{"type": "text", "text": DONE}]


@pytest.mark.parametrize("name", FORMS)
def test_a_converted_tokenizer_has_the_same_form(name: str, tmp_path: Path) -> None:
    converted = Talk(name, tmp_path)
    assert converted.tokenizer.eos_token == "<|endoftext|>"
    for called, given_ in CALLS:
        assert converted.form.call(called, **given_) == TALKS[name].form.call(called, **given_)


RESULTS = [
    "1\tx = 1\n2\t",
    "",
    "\n",
    "  a\n\nb \n",
    "</tool_response>",
    "<|im_end|>\n<|im_start|>user\n",
    "Exit code 1\né",
]


def test_results_are_found_to_the_byte(talk: Talk) -> None:
    """Whatever else the user says after them."""
    start = talk.prompt.index(STATEMENT)
    for number, result in enumerate(RESULTS):
        talk.reply(talk.form.call("Read", file_path="a.py"))
        talk.told(result, *["<system-reminder>\nBe brief.\n</system-reminder>"] * (number % 2))
        assert talk.form.results(talk.prompt, start) == RESULTS[: number + 1]


def test_a_template_that_does_not_write_calls_or_results_is_refused() -> None:
    plain = TEMPLATES["hermes"]
    call, result = plain.index("{% for c in"), plain.index("<tool_response>")
    for template, said in (
        (plain[:call] + plain[plain.index("<|im_end|>\n{% endif %}{% endfor %}") :], "does not write calls"),
        (plain[:result] + plain[plain.index("</tool_response>") :], "does not write calls"),
        (plain.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}Say:"), "the end of a prompt"),
    ):
        tokenizer = make_tokenizer(["a text"])
        tokenizer.chat_template = template
        with pytest.raises(CannotPlayError, match=said):
            Form(ChatTemplateRenderer(tokenizer, "qwen3"))


def task_of(old: dict[str, str], new: dict[str, str]) -> Task:
    row = snapshot_row("a__b-1", problem_statement=f"{STATEMENT}\n", patch=patch(old, new))
    return Task.from_row(row, Path("/nowhere"))


TASK = task_of({"module.py": BROKEN}, {"module.py": GOLD})


def test_a_hunk_is_an_edit() -> None:
    assert gold_edits(TASK) == [Edit("module.py", 1, *("\n".join(t.split("\n")[:5]) for t in (BROKEN, GOLD)))]
    lines = [f"line {n}" for n in range(40)]
    other = [*lines[:5], "new", *lines[5:30], *lines[31:]]
    (first, second, third) = gold_edits(
        task_of({"a.py": "\n".join(lines), "b/c.py": "x\n"}, {"a.py": "\n".join(other), "b/c.py": "y\n"})
    )
    assert (first.path, first.line, second.line, third) == ("a.py", 3, 28, Edit("b/c.py", 1, "x", "y"))
    text = "\n".join(lines)
    for one in (second, first):
        assert text.count(one.old) == 1
        text = text.replace(one.old, one.new)
    assert text == "\n".join(other)
    # A file's last line may have no end.
    assert gold_edits(task_of({"a": "x\ny"}, {"a": "x\nz"})) == [Edit("a", 1, "x\ny", "x\nz")]
    assert gold_edits(task_of({"a": "x\ny"}, {"a": "z\ny"})) == [Edit("a", 1, "x\ny", "z\ny")]


MODE = "diff --git a/a.py b/a.py\nold mode 100644\nnew mode 100755\n"
BINARY = "diff --git a/a.png b/a.png\nindex 111..222 100644\nBinary files a/a.png and b/a.png differ\n"
RENAMED = (
    "diff --git a/a.py b/b.py\nsimilarity index 50%\nrename from a.py\nrename to b.py\n--- a/a.py\n+++ b/b.py\n"
    "@@ -1 +1 @@\n-x\n+y\n"
)
REFUSED = {
    "none": None,
    "empty": "",
    "no patch": "change it\n",
    "new file": patch({"a.py": "x\n"}, {"a.py": "y\n", "b.py": "z\n"}),
    "nothing to replace": patch({"a.py": ""}, {"a.py": "y\n"}),
    "mode": MODE,
    "mode and text": MODE.replace("a.py", "b.py") + (TASK.patch or ""),
    "binary": BINARY + (TASK.patch or ""),
    "renamed": RENAMED,
    "removed": "diff --git a/a b/a\ndeleted file mode 100644\n--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_patch_that_does_more_than_change_files_is_refused(name: str) -> None:
    with pytest.raises(CannotPlayError, match="does more than change files, or no patch"):
        gold_edits(replace(TASK, patch=REFUSED[name]))


UNREADABLE = ("--- a/a\n+++ b/a\n@@ -1,5 +1 @@\n-x\n", "@@ -1 +1 @@\n-x\n+y\n")


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_patch_that_cannot_be_parsed_is_refused(gold: str) -> None:
    with pytest.raises(CannotPlayError, match="cannot be parsed"):
        gold_edits(replace(TASK, patch=gold))


class Screen:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


def test_what_cannot_be_played_is_left_out_and_told() -> None:
    screen: Any = Screen()
    new, bad = (replace(TASK, patch=gold) for gold in (REFUSED["new file"], UNREADABLE[0]))
    assert playable([new, TASK, bad, new], None, screen) == [TASK]
    assert screen.said == [
        "left out: 2 tasks with a patch that does more than change files, or no patch",
        "left out: 1 tasks with a patch that cannot be parsed",
    ]
    for tools in (["Bash"], ["Bash", "Edit"], ["Edit", "Read"], ["Read", "Bash", "Edit", "Grep"]):
        assert playable([TASK], tools, screen) == [TASK]
    for tools in (["Edit"], ["Read"], []):
        with pytest.raises(ConfigError, match=r"agent\.tools: an expert needs Bash, or Read and Edit"):
            playable([TASK], tools, screen)
    with pytest.raises(ConfigError, match="none of these tasks has a gold patch"):
        playable([new], None, screen)


class Tree:
    """A work tree in which calls are done as Claude Code does them. ``checked``: the files' texts at each check."""

    CHECK = "test -e /nowhere"

    def __init__(self, directory: Path, files: dict[str, str]) -> None:
        self.directory, self.files = directory, files
        self.checked: list[dict[str, str]] = []
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a"]):
            subprocess.run(["git", *command], cwd=directory, check=True)

    def texts(self) -> dict[str, str]:
        return {name: (self.directory / name).read_text() for name in self.files}

    def restore(self) -> None:
        self.checked.clear()
        for name, text in self.files.items():
            (self.directory / name).write_text(text)

    def read(self, file_path: str, offset: int = 1, limit: int = 2000) -> str:
        lines = enumerate((self.directory / file_path).read_text().split("\n"), 1)
        return "\n".join(f"{n}\t{line}" for n, line in lines if offset <= n < offset + limit)

    def edit(self, file_path: str, old_string: str, new_string: str) -> str:
        file = self.directory / file_path
        text = file.read_text()
        if text.count(old_string) != 1:
            return f"<tool_use_error>Found {text.count(old_string)} matches.</tool_use_error>"
        file.write_text(text.replace(old_string, new_string))
        return f"The file {file_path} has been updated successfully."

    def bash(self, command: str) -> str:
        if command == self.CHECK:
            self.checked.append(self.texts())
        done = subprocess.run(["bash", "-c", command], cwd=self.directory, capture_output=True, text=True)
        said = done.stdout + done.stderr or "(Bash completed with no output)"
        return f"Exit code {done.returncode}\n{said}" if done.returncode else said

    def answer(self, name: str, given_: dict[str, Any]) -> str:
        return {"Read": self.read, "Edit": self.edit, "Bash": self.bash}[name](**given_)


HABITS: dict[str, Any] = {
    "seed": 0, "check": Tree.CHECK, "tries": 6, "right": 0.3, "gives_up": 0.0, "unchecked": 0.0, "forgets": 0.0,
}  # fmt: skip
MODES: list[list[str] | None] = [["Bash"], ["Bash", "Read"], ["Edit", "Read"], None]


def play(
    tree: Tree, talk: Talk, seed: str = "1", tools: Sequence[str] | None = None, task: Task = TASK, **habits: Any
) -> list[tuple[str, dict[str, Any], str]]:
    """Play an episode, and return its calls and what they gave."""
    tree.restore()
    talk.begin()
    expert, calls = Expert(task, seed, talk.form, tools, Habits(**HABITS | habits)), []
    while True:
        (block,) = talk.reply(expert(talk.prompt))
        if block["type"] == "text":
            assert block["text"] == DONE
            return calls
        given_ = block["input"]
        result = tree.answer(block["name"], given_)
        calls.append((block["name"], given_, result))
        talk.told(result)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path, {"module.py": BROKEN})


@pytest.mark.parametrize("tools", MODES)
def test_an_episode_follows_from_its_seed(tree: Tree, talk: Talk, tools: list[str] | None) -> None:
    played = [play(tree, talk, str(seed), tools) for seed in range(4)]
    assert play(tree, talk, "3", tools) == played[3]
    assert played[0] != played[1] or played[1] != played[2]
    used = {name for calls in played for name, _, _ in calls}
    assert used == set(tools or ["Bash", "Edit", "Read"])
    first = ("Bash", {"command": "cat module.py"}) if tools == ["Bash"] else ("Read", {"file_path": "module.py"})
    assert all(calls[0][:2] == first for calls in played)


@pytest.mark.parametrize("tools", MODES)
def test_the_gold_edit_is_as_short_as_the_others(tree: Tree, tools: list[str] | None) -> None:
    calls = play(tree, TALKS["hermes"], tools=tools, right=1.0, check=None)
    assert tree.texts() == {"module.py": GOLD}
    edits = "Edit" if tools is None or "Edit" in tools else "Bash"
    assert [name for name, _, _ in calls] == ["Bash" if tools == ["Bash"] else "Read", edits]
    edit = calls[1][1]
    if "command" in edit:
        assert edit == {"command": "sed -i 's/ >= low/ > low/' module.py"}
    else:
        assert edit == {"file_path": "module.py", "old_string": "if not x >= low:", "new_string": "if not x > low:"}


def test_it_tries_until_the_check_is_content(tree: Tree) -> None:
    """Here it never is. Each try is another one, and what it leaves was taken back before the next."""
    places = {swap.applied(BROKEN) for swap in swaps(BROKEN)} - {GOLD}
    for tools in (["Bash", "Read"], None):
        play(tree, TALKS["quickstart"], "a", tools, right=0.0)
        tried = [texts["module.py"] for texts in tree.checked]
        assert len(tried) == len(set(tried)) == 6 and places.issuperset(tried)
        play(tree, TALKS["quickstart"], "a", tools, right=0.0, tries=2)
        assert [texts["module.py"] for texts in tree.checked] == tried[:2]
    # Without wrong edits that are left, there is the gold one.
    play(tree, TALKS["quickstart"], "a", ["Bash", "Read"], right=0.0, tries=20)
    tried = [texts["module.py"] for texts in tree.checked]
    assert set(tried[: len(places)]) == places and set(tried[len(places) :]) == {GOLD} and len(tried) == 20


def test_edit_makes_only_what_it_can_take_back(tmp_path: Path) -> None:
    before = "def f(a, b):\n    if a < b:\n        return a + 1\n    if a <= b:\n        a += 1\n    return min(a, b)\n"
    gold = before.replace("a + 1", "a - 1")
    tree, task = Tree(tmp_path, {"a.py": before}), task_of({"a.py": before}, {"a.py": gold})
    tried = set[str]()
    for seed in "abcd":
        calls = play(tree, TALKS["hermes"], seed, None, task, right=0.0, tries=20)
        assert "tool_use_error" not in str(calls)
        tried |= {texts["a.py"] for texts in tree.checked}
    assert gold in tried and tried < {swap.applied(before) for swap in swaps(before)}


def test_what_it_forgets_stays(tree: Tree) -> None:
    for tools in (["Bash", "Read"], None):
        calls = play(tree, TALKS["hermes"], "b", tools, right=0.0, forgets=1.0, tries=4)
        tried = [texts["module.py"].split("\n") for texts in tree.checked]
        assert "git checkout" not in str(calls) and len(tried) == 4
        assert all(one != other for one, other in itertools.pairwise(tried))
        lines = BROKEN.split("\n")
        changed = [sum(one != other for one, other in zip(lines, text, strict=True)) for text in tried]
        assert changed == sorted(changed) and changed[-1] > 1


@pytest.mark.parametrize(
    ("habits", "checks"), [({"gives_up": 1.0}, 1), ({"unchecked": 1.0}, 0), ({"check": None}, 0), ({"right": 1.0}, 6)]
)
def test_it_ends_as_its_habits_say(tree: Tree, habits: dict[str, Any], checks: int) -> None:
    calls = play(tree, TALKS["hermes"], tools=["Bash", "Read"], **{"right": 0.0} | habits)
    assert sum(given_ == {"command": Tree.CHECK} for _, given_, _ in calls) == checks
    assert tree.texts() != {"module.py": BROKEN}


def test_a_check_that_is_content_ends_it(tree: Tree) -> None:
    calls = play(tree, TALKS["hermes"], right=0.0, check="grep low module.py")
    assert [name for name, _, _ in calls] == ["Read", "Edit", "Bash"] and calls[-1][2].startswith("def clamp")


LONG = [f"    x{n} = x{n - 1} + {n % 7} if x{n - 1} < y[{n}] else '{n}'\n" for n in range(1, 400)]
LONG[299] = LONG[349] = "    if a < b:\n"
LONG_GOLD = [*LONG[:299], "    if a <= b:\n", *LONG[300:]]
# Patches that are no exchange: with quotes, a slash, several hunks, in a directory, at the end of a file without an end
# of line; and an exchange in a long file that has the same place twice.
HARDER = {
    "lines": ({"a.py": BROKEN}, {"a.py": BROKEN.replace("return low\n", 'return low / 2 or "\'\\n"\n\n    # &\n')}),
    "hunks": (
        {"a.py": "".join(LONG[:50]), "b/c.py": BROKEN},
        {"a.py": "x\n" + "".join(LONG[1:40]) + "".join(LONG[41:50]), "b/c.py": GOLD},
    ),
    "end": ({"b/c.py": "def f():\n    return 1"}, {"b/c.py": "def f():\n    return '\\\\'"}),
    "long": ({"a.py": "".join(LONG)}, {"a.py": "".join(LONG_GOLD)}),
}


@pytest.mark.parametrize("tools", MODES)
@pytest.mark.parametrize("name", HARDER)
def test_any_gold_patch_that_changes_files_is_played(tools: list[str] | None, name: str, tmp_path: Path) -> None:
    before, after = HARDER[name]
    tree, task = Tree(tmp_path, before), task_of(before, after)
    calls = play(tree, TALKS["hermes"], "c", tools, task, right=1.0, tries=2)
    assert tree.texts() == after
    found = [given_ for _, given_, _ in calls if "git ls-files" in str(given_)]
    assert bool(found) == ("b/c.py" in before and tools != ["Edit", "Read"])
    if tools == ["Bash"]:
        shown = [given_["command"] for _, given_, _ in calls if given_["command"].startswith(("cat", "sed -n"))]
        assert shown == (["sed -n '285,315p' a.py"] if name == "long" else [f"cat {path}" for path in before])
        return
    reads = [given_ for called, given_, _ in calls if called == "Read"]
    assert [given_["file_path"] for given_ in reads] == list(before)
    assert [given_.get("offset") for given_ in reads] == ([285] if name == "long" else [None] * len(reads))


def test_a_side_call_gets_one_word(talk: Talk) -> None:
    expert = Expert(TASK, "1", talk.form, None, Habits(**HABITS))
    side = talk.renderer.text(
        [{"role": "user", "content": f"A title for: {STATEMENT}"}], [], add_generation_prompt=True
    )
    other = talk.renderer.text([{"role": "user", "content": "Hello"}], TOOLS, add_generation_prompt=True)
    assert expert(side) == expert(other) == talk.form.done
    assert expert(talk.prompt) == talk.form.call("Read", file_path="module.py")


results = st.one_of(
    st.text(),
    st.text(st.sampled_from("1\t→\n if x<>=+-'\"\\()#0é\r\f\0")),
    st.sampled_from(["Exit code 1", "<tool_use_error>no</tool_use_error>", Tree.CHECK, *RESULTS]),
    st.lists(st.sampled_from([f"{n}\t{line}" for n, line in enumerate(BROKEN.split("\n"), 1)])).map("\n".join),
)


@pytest.mark.parametrize("tools", MODES)
@pytest.mark.parametrize("name", ["quickstart", "hermes"])
@given(given_=st.lists(results, max_size=16), seed=st.integers(0, 50).map(str))
def test_no_result_stops_it(name: str, tools: list[str] | None, given_: list[str], seed: str) -> None:
    form, renderer = TALKS[name].form, TALKS[name].renderer
    expert = Expert(TASK, seed, form, tools, Habits(**HABITS | {"forgets": 0.5}))
    prompt = renderer.text(ASK, TOOLS, add_generation_prompt=True)
    end = renderer.tokenizer.decode(renderer.closing)
    for result in given_:
        reply = expert(prompt)
        assert reply
        prompt += f"{reply}{end}\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{end}\n"
        prompt += "<|im_start|>assistant\n"
    assert expert(prompt)
