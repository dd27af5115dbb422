"""This module finds the files of the repository that some of its tests depend on, without running them.

From a file one gets to what it imports, to the modules and paths that its strings name, and to the data files that lie
beside a module; from a test also to the conftest.py above it. What a run reads beyond that is found while it runs
(tests.reads).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.reads import UnknownError, listed

ROOT = Path(__file__).parents[1]
TOPS = ("rl", "rollout", "rewards", "tests", "scripts", "configs", "examples", "docs", "constraints", "packaging")
CODE = (".py", ".sh", ".sbatch")
# What is loaded by a name that only configs or an entry point have, or found by looking.
NAMED_ELSEWHERE = {
    "rl/train/__main__.py": (
        "rl/train/agent_loop.py",
        "rl/train/dataset.py",
        "rl/cpu/__init__.py",
        "rl/cpu/checkpoint_engine.py",
    ),
    "rl/episodes/boxes.py": ("rl/episodes/ssh.py",),
    "rl/run/vllm_server.py": ("rl/run/vllm_plugin.py",),
    "rl/cpu/vllm_replica.py": ("rl/run/vllm_plugin.py",),
    "rl/ingest.py": ("rl/traces/ingest",),
    "scripts/exactness/engine.py": ("rl/run/vllm_plugin.py",),
    "tests/boxes/test_kubernetes.py": ("packaging/kubernetes",),
    "tests/integration/agents/test_mixed.py": ("rl/cpu/__init__.py",),
    "rollout/proxy/front/__init__.py": ("rollout/proxy/front",),
    "tests/published.py": ("scripts/smollm2.jinja",),
    "tests/unit/commands/test_help.py": ("scripts", "examples"),
    "tests/unit/scripts/test_setup.py": ("constraints", "packaging/container", "scripts"),
}


def inputs(folders: Iterable[str]) -> set[str]:
    """Return the paths, from the root, of all that the tests below these folders depend on."""
    found: set[str] = set()
    waiting = [path for folder in folders for path in _files(folder)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _named_by(path)
    return found


@functools.cache
def _all() -> list[str]:
    try:
        return listed(ROOT)
    except UnknownError:
        return sorted(str(path.relative_to(ROOT)) for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file())


@functools.cache
def _files(folder: str) -> list[str]:
    """Return the files below a folder, or the path itself if it is one's; nothing that git ignores."""
    return [folder] if (ROOT / folder).is_file() else [path for path in _all() if path.startswith(f"{folder}/")]


@functools.cache
def _named_by(path: str) -> list[str]:
    """Return what a file leads to."""
    found = [file for named in NAMED_ELSEWHERE.get(path, ()) for file in _files(named)]
    file = ROOT / path
    if path.endswith(".py"):
        try:
            found += _by_python(path, ast.parse(file.read_text()))
        except SyntaxError:
            return found  # lint and pytest say so
        found += _beside(str(file.parent.relative_to(ROOT))) if path.startswith(("rl/", "rollout/", "rewards/")) else []
        above = ("__init__.py", "conftest.py") if file.name.startswith("test_") else ("__init__.py",)
        found += [
            str((parent / name).relative_to(ROOT))
            for parent in file.parents
            if parent.is_relative_to(ROOT)
            for name in above
            if (parent / name).exists()
        ]
    elif path.endswith(CODE):
        lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
        found += [one for word in re.findall(r"[\w./-]+", "\n".join(lines)) for one in _word(word, path)]
    return found


@functools.cache
def _beside(package: str) -> list[str]:
    """Return the data files of a package: those in its folder and in folders below it that are no packages."""
    below = [path for path in _files(package) if not path.endswith(".py")]
    packages = {str(Path(path).parent) for path in _files(package) if path.endswith("/__init__.py")} - {package}
    return [path for path in below if not any(path.startswith(f"{other}/") for other in packages)]


def _by_python(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield what Python code imports or names in a string."""
    told = path.startswith(("tests/", "scripts/"))  # commands stand in their strings, not only messages
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module(alias.name, path)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                yield from _module(f"{node.module}.{alias.name}", path)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = list(_division(node))
            yield from _path("/".join(parts), path)
            waiting += [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for word in node.value.split() if told else [node.value]:
                yield from _word(word, path)
        waiting += ast.iter_child_nodes(node)


def _division(node: ast.expr) -> Iterator[str]:
    """Yield the strings of ``ROOT / "a" / "b"``, up to the first part that is none."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts.append(node.right)
        node = node.left
    for part in reversed(parts):
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            return
        yield part.value


def _word(word: str, namer: str) -> Iterator[str]:
    """Yield what a word names: a module (``rl.train``, ``pkg://rl.train.dataset``, ``rl.a:b``) or a file."""
    word = word.removeprefix("pkg://")
    name, _, more = word.partition(":")
    name = name.removeprefix("./")
    if "/" in name or Path(name).suffix in CODE:
        yield from _path(name, namer)
    elif "." in name and name.partition(".")[0] in TOPS:
        yield from _module(name, "")
    elif namer.startswith("scripts/") and ("." in name or more):  # a program there starts another one's function
        yield from _path(f"{name.partition('.')[0]}.py", namer)


def _path(path: str, namer: str) -> list[str]:
    """Return the file of that path, or all files below it; a folder of code is too much to be meant.

    The path begins at the root, or beside the file that names it.
    """
    path = path.strip("/")
    if not path or ".." in path:
        return []
    beside = str(Path(namer).parent / path)
    if "/" in namer and (ROOT / beside).exists() and ("/" in path or (ROOT / beside).is_file()):
        return _files(beside)
    if path.partition("/")[0] not in TOPS or not (ROOT / path).exists():
        return []
    found = _files(path)
    if path in found or path in ("configs", "constraints", "examples"):
        return found
    code = "/" not in path or (path.startswith("tests/") and any(one.endswith(".py") for one in found))
    return [] if code else found


def _module(name: str, importer: str) -> Iterator[str]:
    """Yield the file of a module, or of the longest beginning of the name that is one."""
    parts = name.split(".")
    if parts[0] not in TOPS:  # programs in scripts/ and examples/ import their neighbours
        neighbour = str(Path(importer).with_name(f"{parts[0]}.py"))
        beside = (neighbour, f"scripts/{parts[0]}.py")
        yield from (path for path in beside if (ROOT / path).is_file())
        return
    for length in range(len(parts), 0, -1):
        base = "/".join(parts[:length])
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if (ROOT / path).is_file():
                yield path
                main = f"{base}/__main__.py"
                if not importer and (ROOT / main).is_file():  # it is started
                    yield main
                return
