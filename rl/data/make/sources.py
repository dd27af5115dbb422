"""Fetch a package's source distribution and read what it says about itself. Nothing of it is run.

pip would run a package's build to download its source, so the index is asked here, with pip's own settings.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import email.message
import email.parser
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from rl.data.make.repositories import git

_TIMEOUT_S = 60.0
_LARGEST = 100 * 2**20  # bytes of an archive, and of what is in it
_MOST_FILES = 20_000
_GROUPS = ("test", "tests", "testing", "dev-test", "unittest")  # names of extras and groups with what tests need
_FILES = ("requirements/test*.txt", "requirements/test*.in", "*requirements*test*.txt", "*test*requirements*.txt")
# Plugins of pytest that check how code is written; they run no test, and old ones end pytest.
_CHECKERS = re.compile("pytest[-_.](flake8|black|mypy|isort|pylint|pycodestyle|pep8|pyflakes|ruff)", re.IGNORECASE)
_LEFT_OUT = {"..", ".git", ".venv", "__pycache__", ".pytest_cache"}
# What stands beside a package without being part of it.
_BESIDE = {"tests", "test", "testing", "docs", "doc", "examples", "example", "benchmarks", "benchmark", "scripts"}
_BESIDE |= {"tools", "tasks", "setup", "conftest", "noxfile", "versioneer", "build", "dist", "fabfile", "ci", "bench"}


class MakeError(ValueError):
    """No tasks can be made. The message is one line that says of what, why, and what to do."""


@dataclass(frozen=True)
class Package:
    """A package is an unpacked source distribution.

    tree: its directory. sha256: of the archive. licence: as the package names it. root: the directory below `tree`
    from which the package is imported. modules: the names that it is imported by. requires: what the package and its
    tests need. metadata: its PKG-INFO.
    """

    name: str
    version: str
    tree: Path
    sha256: str
    licence: str
    root: str
    modules: tuple[str, ...]
    requires: tuple[str, ...]
    metadata: str

    @property
    def label(self) -> str:
        """Return name and version as one word."""
        return f"{self.name}-{self.version}"

    def sources(self) -> list[str]:
        """Return the package's own Python files, as paths below `tree`."""
        start = self.tree / self.root
        found = [start / f"{name}.py" for name in self.modules]
        found += [file for name in self.modules for file in sorted((start / name).rglob("*.py"))]
        return [file.relative_to(self.tree).as_posix() for file in found if file.is_file()]


def name_of(spec: str) -> str:
    """Return the package's name in NAME==VERSION, or in the path of a source distribution or a git repository."""
    if Path(spec).is_dir():
        return canonicalize_name(Path(spec).resolve().name)
    file = Path(spec).name.removesuffix(".tar.gz")
    return canonicalize_name(file.partition("==")[0].strip() if "==" in file else file.rpartition("-")[0])


def fetch(spec: str, directory: Path) -> tuple[Path, str]:
    """Return a source distribution's archive and its SHA-256.

    spec: NAME==VERSION, whose archive is downloaded to ``directory`` unless it is there already, or the path of an
    archive, or of a git repository, whose HEAD is archived there. Raises MakeError.
    """
    if Path(spec).is_dir():
        commit = git_of(Path(spec), "rev-parse", "--verify", "HEAD").decode().strip()
        path = directory / f"{name_of(spec)}-{commit[:12]}.tar.gz"
        content = git_of(Path(spec), "archive", "--format=tar", f"--prefix={name_of(spec)}/", commit)
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path, hashlib.sha256(content).hexdigest()
    if spec.endswith(".tar.gz"):
        path = Path(spec)
        if not path.is_file():
            raise MakeError(f"{spec}: no such file; name a source distribution, or a package as NAME==VERSION")
        return path, hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        wanted = Requirement(spec)
        version = Version(str(wanted.specifier).removeprefix("=="))
    except (InvalidRequirement, InvalidVersion):
        raise MakeError(f"{spec}: write a package as NAME==VERSION, such as inflection==0.5.1") from None
    name = canonicalize_name(wanted.name)
    url, digest = _link(spec, name, version)
    path = directory / f"{name}-{version}.tar.gz"
    if not path.exists():
        content = _get(url, "*/*")
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest and digest != found:
        path.unlink()
        raise MakeError(f"{spec}: the index promises another archive than it sends (SHA-256); try again")
    return path, found


def git_of(repository: Path, *arguments: str) -> bytes:
    """Return what git prints in somebody's repository. Raises MakeError."""
    try:
        return git(repository, *arguments)
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip().split("\n")[0]
        raise MakeError(f"{repository}: git {arguments[0]} fails: {said or error}") from error


def _link(spec: str, name: str, version: Version) -> tuple[str, str]:
    """Return where the index has a source distribution, and its SHA-256 if the index tells it."""
    page = f"{_index().rstrip('/')}/{name}/"
    kinds = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
    text = _get(page, kinds).decode(errors="replace")
    for file, url, digest in _files(text):
        try:
            found = parse_sdist_filename(file)
        except (InvalidSdistFilename, InvalidVersion):
            continue
        if found == (name, version) and file.endswith(".tar.gz"):
            return urllib.parse.urljoin(page, url), digest
    raise MakeError(f"{spec}: the index has no source distribution (.tar.gz) of it; `pip index versions {name}` lists")


def _files(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (file name, URL, SHA-256 or "") of an index page, which is JSON or HTML."""
    try:
        for file in json.loads(page)["files"]:
            yield file["filename"], file["url"], file.get("hashes", {}).get("sha256", "")
    except (ValueError, KeyError, TypeError):
        links = _Links()
        links.feed(page)
        for link in links.found:
            url, _, fragment = link.partition("#")
            digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
            yield urllib.parse.unquote(PurePosixPath(urllib.parse.urlsplit(url).path).name), url, digest


class _Links(HTMLParser):
    """This collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _index() -> str:
    """Return the address of the package index that pip uses. Raises MakeError."""
    # Only the list of settings has passwords, and only the help has the index that pip uses if none is set.
    settings, about = _pip("config", "list"), _pip("download", "--help")
    found = re.findall(r"^(?:global|install|download|:env:)\.index-url='(.*)'$", settings, re.MULTILINE)
    found = found or re.findall(r"Index \(default (\S+)\)", about)
    if not found:
        raise MakeError("pip does not say which package index it uses: see `pip config list`, and set its index-url")
    return found[-1]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "999"}).stdout


def _get(url: str, accept: str) -> bytes:
    """Return what an address has. Raises MakeError."""
    parts = urllib.parse.urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    try:
        request = urllib.request.Request(plain.geturl(), headers={"Accept": accept, "User-Agent": "pip"})
        if parts.username:  # it is for this host alone
            word = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(word.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read(_LARGEST + 1)
    except (urllib.error.URLError, TimeoutError, OSError, ValueError) as error:
        raise MakeError(f"the package index does not answer for {parts.path}: {error}; see `pip config list`") from None
    if len(content) > _LARGEST:
        raise MakeError(f"{parts.path}: larger than {_LARGEST >> 20} MiB")
    return content


def unpack(archive: Path, directory: Path) -> None:
    """Unpack a source distribution's one folder as `directory`: regular files only, no links, history or caches.

    Raises MakeError.
    """
    total = 0
    try:
        with tarfile.open(archive) as tar:
            for number, member in enumerate(tar):
                path = PurePosixPath(member.name)
                total += member.size
                if number > _MOST_FILES or total > _LARGEST:
                    raise MakeError(f"{archive.name}: more than {_MOST_FILES} files or {_LARGEST >> 20} MiB")
                if not member.isfile() or len(path.parts) < 2 or _LEFT_OUT & set(path.parts) or path.is_absolute():
                    continue
                target = directory.joinpath(*path.parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                target.write_bytes(content.read() if content else b"")
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise MakeError(f"{archive.name}: cannot be unpacked: {error}") from error


def read(tree: Path, sha256: str, extra: Iterable[str] = ()) -> Package:
    """Read an unpacked source distribution. extra: further requirements of its tests. Raises MakeError."""
    try:
        metadata = email.parser.Parser().parsestr((tree / "PKG-INFO").read_text(errors="replace"))
    except OSError:
        metadata = _written(tree)
    name, version = canonicalize_name(metadata["Name"] or ""), metadata["Version"] or ""
    if not name:
        raise MakeError("neither PKG-INFO nor pyproject.toml or setup.cfg names the package and what it needs")
    if "Requires-Dist" not in metadata:  # older builds write requirements into a file of their own only
        for line in _of_egg_info(tree):
            metadata["Requires-Dist"] = line
    root, modules = _layout(tree, name)
    if not modules:
        raise MakeError(f"{name}=={version}: no Python package or module was found in it")
    named = [one for one in metadata.get_all("Provides-Extra", []) if canonicalize_name(one) in _GROUPS]
    needs = _of_extras(metadata, name, [""])
    tests = [*_of_extras(metadata, name, named), *_of_groups(tree)] or _of_files(tree)
    used = [one for one in tests if not _CHECKERS.match(one)]
    requires = dict.fromkeys([*needs, *used, *extra])
    return Package(name, version, tree, sha256, _licence(metadata), root, modules, tuple(requires), str(metadata))


def _written(tree: Path) -> email.message.Message:
    """Return what pyproject.toml or setup.cfg say, which a build would write into PKG-INFO."""
    config, metadata = configparser.ConfigParser(interpolation=None, strict=False), email.message.Message()
    with contextlib.suppress(OSError, ValueError, configparser.Error):
        config.read_string((tree / "setup.cfg").read_text())
    project: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    extras = dict(config.items("options.extras_require")) if config.has_section("options.extras_require") else {}
    needs = config.get("options", "install_requires", fallback="").split("\n")
    sections = {"": [*needs, *project.get("dependencies", [])]}
    sections |= {extra: text.split("\n") for extra, text in extras.items()} | project.get("optional-dependencies", {})
    metadata["Name"] = project.get("name") or config.get("metadata", "name", fallback="")
    metadata["Version"] = project.get("version") or "0"
    for extra, lines in sections.items():
        metadata["Provides-Extra"] = extra
        for one in filter(None, map(_requirement, lines)):
            marker = " and ".join([f"({one.marker})"] * bool(one.marker) + [f'extra == "{extra}"'] * bool(extra))
            one.marker = None
            metadata["Requires-Dist"] = f"{one}; {marker}" if marker else str(one)
    return metadata


def _licence(metadata: email.message.Message) -> str:
    named = metadata["License-Expression"] or ""
    classified = [
        value.rpartition("::")[2].strip()
        for value in metadata.get_all("Classifier", [])
        if value.startswith("License ::") and value.count("::") > 1
    ]
    text = named or ", ".join(classified) or metadata["License"] or "not named"
    return " ".join(text.split())[:80]


def _layout(tree: Path, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the directory to import from, and the names of packages and modules there."""
    for root in ("src", "lib", "."):
        start = tree / root
        if not start.is_dir():
            continue
        found = [entry.parent.name for entry in start.glob("*/__init__.py")]
        found += [entry.stem for entry in start.glob("*.py")]
        found = sorted({one for one in found if one.isidentifier() and not _is_beside(one)})
        own = [one for one in found if canonicalize_name(one) == name]
        if found:
            return root, tuple(own or found)
    return ".", ()


def _is_beside(name: str) -> bool:
    return name in _BESIDE or name.startswith(("test_", "_test")) or name.endswith("_test")


def _of_egg_info(tree: Path) -> Iterator[str]:
    """Yield the requirements in requires.txt, whose sections are extras and markers, as PKG-INFO has them."""
    marker = ""
    for file in sorted([*tree.glob("*.egg-info/requires.txt"), *tree.glob("*/*.egg-info/requires.txt")])[:1]:
        for line in map(str.strip, file.read_text(errors="replace").split("\n")):
            if line.startswith("["):
                extra, _, rest = line.strip("[]").partition(":")
                marker = " and ".join([f"({rest})"] * bool(rest) + [f'extra == "{extra}"'] * bool(extra))
            elif line:
                yield f"{line}; {marker}" if marker else line


def _of_extras(metadata: email.message.Message, name: str, extras: list[str]) -> list[str]:
    """Return what the package needs with these extras; "" is none."""
    found: list[str] = []
    extras = list(extras)
    for extra in extras:  # it grows
        for one in map(_requirement, metadata.get_all("Requires-Dist", [])):
            if one is None or not (one.marker is None or one.marker.evaluate({"extra": extra})):
                continue
            if canonicalize_name(one.name) == name:  # its own extras: `tests` in `dev`
                extras += sorted(one.extras - set(extras))
            else:
                one.marker = None
                found.append(str(one))
    return found


def _of_groups(tree: Path) -> list[str]:
    """Return what the dependency groups for tests in pyproject.toml name."""
    try:
        groups = tomllib.loads((tree / "pyproject.toml").read_text()).get("dependency-groups", {})
    except (OSError, ValueError):
        return []
    if not isinstance(groups, dict):
        return []
    found: list[str] = []
    left = [name for name in groups if canonicalize_name(name) in _GROUPS]
    for name in left:  # it grows
        for one in lines if isinstance(lines := groups.get(name), list) else ():
            if isinstance(one, str):
                found.append(one)
            elif isinstance(one, dict) and (more := str(one.get("include-group"))) not in left:
                left.append(more)
    return _clean(found)


def _of_files(tree: Path) -> list[str]:
    """Return what the usual files of requirements for tests name."""
    files = sorted({file for pattern in _FILES for file in tree.glob(pattern) if file.is_file()})
    lines = [line.partition(" #")[0].strip() for file in files for line in file.read_text(errors="replace").split("\n")]
    return _clean(lines)


def _clean(lines: Iterable[str]) -> list[str]:
    found = []
    for line in lines:
        one = _requirement(line)
        if one is not None and not one.url and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            found.append(str(one))
    return found


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None
