"""Docstrings open with a sentence: those of functions with a verb, those of modules and classes with a subject and
one.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for top in ("rl", "rollout", "rewards") for path in sorted((ROOT / top).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NEVER = {
    "and",
    "as",
    "from",
    "how",
    "less",
    "of",
    "than",
    "that",
    "those",
    "what",
    "where",
    "whether",
    "which",
    "whose",
    "with",
    "without",
}
NOT_A_VERB = NEVER | {"a", "all", "an", "and", "as", "each", "for", "in", "it", "no", "not", "the", "this", "two"}
# Words that can be a finite verb whose subject is one thing. Whatever else ends in s or ed counts as one, too: nouns
# in the plural let a fragment pass, and no sentence is taken for a fragment.
FINITE = re.compile(
    r"\b(is|are|was|were|has|had|have|does|did|do|can|cannot|may|might|must|will|would|shall|should|could|became|began"
    r"|broke|came|fell|found|gave|got|held|kept|knew|left|lost|made|met|put|ran|read|said|sent|took|went|wrote"
    r"|[a-z]+s|[a-z]+ed)\b"
)
NO_VERB = re.compile(r"\b(this|its|as|less|process|access|address|across|always|perhaps|besides|class|plus|us)\b")
RELATIVE = re.compile(r"\b(that|which|who|whose)\b")
OPENS_WITH_A_NOUN = re.compile(r"(A|An|The|One|``[^`]+``|`[^`]+`|[\w.]+'s?) ")
THIRD_PERSON = re.compile(r"(\w+)s (a|an|the|its|one|each|all)\b")


def first_clause(docstring: str) -> str:
    """Return a docstring up to the first mark that ends a clause, without names in backquotes and parentheses."""
    text = re.sub(r"\([^()]*\)|'s?\b", "", re.sub(r"``[^`]*``|`[^`]*`", "X", " ".join(docstring.split())))
    return re.split(r"[.:;?!]( |$)", text, maxsplit=1)[0]


def is_fragment(docstring: str) -> bool:
    """Tell whether a module's or class's docstring certainly opens without a verb, as in "The path of a file."

    A relative clause takes one verb of its own: "A box that boots" has none left.
    """
    if not OPENS_WITH_A_NOUN.match(docstring):
        return False
    words = NO_VERB.sub(" ", first_clause(docstring).partition(" ")[2])
    relative = RELATIVE.search(words)
    if FINITE.search(words[: relative.start()] if relative else words):
        return False
    return len(FINITE.findall(words)) <= len(RELATIVE.findall(words))


def has_no_subject(docstring: str, imperatives: set[str]) -> bool:
    """Tell whether a docstring opens with a function's verb in the third person: "Reads the ..."."""
    opening = THIRD_PERSON.match(docstring)
    return opening is not None and opening[1] in imperatives


def imperatives() -> set[str]:
    """Return the first words of all functions' docstrings."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)]
    return {word for node in nodes for word in (ast.get_docstring(node) or "").split(" ")[:1]}


IMPERATIVES = imperatives()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_a_sentence(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node) or " "
        first = docstring.split("\n")[0]
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        fragment = first.split(" ")[0].rstrip(":,").lower() in (NOT_A_VERB if function else NEVER)
        if not function:
            fragment = fragment or is_fragment(docstring) or has_no_subject(docstring, IMPERATIVES)
        if fragment:
            found.append(f"{getattr(node, 'name', 'module')}: {first}")
    assert found == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_tests_open_with_a_sentence(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or " "
    assert not docstring.startswith("Tests of ") and not is_fragment(docstring)


@pytest.mark.parametrize(
    ("docstring", "fragment"),
    [
        ("The host as verl's only device.", True),
        ("A box that boots while something else is done.", False),  # "is": it may be the sentence's own
        ("A prepared package.", False),  # "prepared" may be its verb
        ("A mix-in that goes before verl's worker: the teacher scores each row.", True),
        ("One generation on a server: the Ray task.", True),
        ("verl's vLLM server with the extension above.", True),
        ("A box whose program ends is closed.", False),
        ("The engine could not answer.", False),
        ("A state is a conversation up to one reply, and that reply.", False),
        ("A patch changes one file.", False),
        ("Rules say which files are dropped.", False),
    ],
)
def test_what_counts_as_a_fragment(docstring: str, fragment: bool) -> None:
    assert is_fragment(docstring) == fragment
