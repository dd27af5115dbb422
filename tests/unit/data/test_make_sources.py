"""Source distributions are hostile archives: what is unpacked, what is read of them, and where they come from."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rl.data.make import environment, runs, sources
from rl.data.make.prepare import _no_test, prepare
from rl.data.make.sources import MakeError, Package

PKG_INFO = """\
Metadata-Version: 2.1
Name: Shop.Tools
Version: 1.0
License: MIT
Requires-Dist: six
Requires-Dist: old; python_version < "3"
Requires-Dist: hypothesis; extra == "tests"
Requires-Dist: shop-tools[more]; extra == "tests"
Requires-Dist: attrs>=20; extra == "more"
Requires-Dist: ruff; extra == "lint"
Provides-Extra: tests
Provides-Extra: lint
"""


def archive(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


def test_nothing_is_unpacked_outside_of_the_directory_and_no_caches(tmp_path: Path) -> None:
    names = ["p-1/a.py", "p-1/../../out", "/etc/out", "p-1/.git/config", "p-1/__pycache__/a.pyc", "p-1/d/b.py", "top"]
    path = archive(tmp_path / "p-1.tar.gz", dict.fromkeys(names, "x"), {"p-1/link": "/etc/passwd"})
    sources.unpack(path, tmp_path / "into" / "tree")
    found = [one.relative_to(tmp_path).as_posix() for one in sorted(tmp_path.rglob("*")) if one.is_file()]
    assert found == ["into/tree/a.py", "into/tree/d/b.py", "p-1.tar.gz"]
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    with pytest.raises(MakeError, match=r"bad\.tar\.gz: cannot be unpacked"):
        sources.unpack(tmp_path / "bad.tar.gz", tmp_path / "bad")


def test_a_package_says_what_it_is_and_what_its_tests_need(tmp_path: Path) -> None:
    files = {
        "PKG-INFO": PKG_INFO,
        "src/shop_tools/__init__.py": "",
        "src/shop_tools/deep/a.py": "",
        "tests/test_a.py": "",
    }
    files["pyproject.toml"] = (
        '[dependency-groups]\ntest = ["pytest-cov", {include-group = "base"}, {include-group = 5}]\nbase = ["pyyaml"]\n'
        "5 = [{include-group = 5}]\ntests = 5\n"
    )
    sources.unpack(archive(tmp_path / "a.tar.gz", {f"p/{name}": text for name, text in files.items()}), tmp_path / "t")
    package = sources.read(tmp_path / "t", "0", ["more"])
    assert (package.name, package.version, package.licence) == ("shop-tools", "1.0", "MIT")
    assert (package.root, package.modules) == ("src", ("shop_tools",))
    assert package.requires == ("six", "hypothesis", "attrs>=20", "pytest-cov", "pyyaml", "more")
    assert package.sources() == ["src/shop_tools/__init__.py", "src/shop_tools/deep/a.py"]


def test_other_layouts_and_files_of_requirements(tmp_path: Path) -> None:
    text = "Name: one\nVersion: 1\nClassifier: License :: OSI Approved :: MIT License\n"
    files = {"PKG-INFO": text, "one.py": "", "setup.py": "", "test_one.py": "", "docs/__init__.py": ""}
    files["requirements-test.txt"] = "freezegun>=1  # time\n-r other.txt\n\n# no\npytest-flake8\n"
    sources.unpack(archive(tmp_path / "a.tar.gz", {f"p/{name}": text for name, text in files.items()}), tmp_path / "t")
    package = sources.read(tmp_path / "t", "0")
    assert (package.root, package.modules, package.licence) == (".", ("one",), "MIT License")
    assert package.requires == ("freezegun>=1",)
    (tmp_path / "t" / "one.py").unlink()
    with pytest.raises(MakeError, match="no Python package or module"):
        sources.read(tmp_path / "t", "0")


@pytest.mark.parametrize("kind", ["json", "html"])
def test_an_archive_comes_from_the_index_of_pip(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tmp_path / "made.tar.gz", {"p/PKG-INFO": ""}).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    page = f'<a href="../../files/shop_tools-1.0.tar.gz#sha256={digest}">x</a><a href="../../files/shop_tools-2.0.whl">'
    if kind == "json":
        file = {
            "filename": "shop_tools-1.0.tar.gz",
            "url": "/files/shop_tools-1.0.tar.gz",
            "hashes": {"sha256": digest},
        }
        page = json.dumps({"files": [file]})
    heard: list[tuple[str, str | None]] = []
    pages = {"/simple/shop-tools/": page.encode(), "/files/shop_tools-1.0.tar.gz": content}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((str(self.headers["Host"]).partition(":")[0], self.headers["Authorization"]))
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{server.server_port}/simple/shop-tools/")
                self.end_headers()
                return
            found = pages.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:word@127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        path, found = sources.fetch("Shop.Tools==1.0", tmp_path / "sdists")
        assert (path.read_bytes(), found) == (content, digest)
        with pytest.raises(MakeError, match="has no source distribution"):
            sources.fetch("shop-tools==3.0", tmp_path / "sdists")
        assert sources._get(f"http://user:word@127.0.0.1:{server.server_port}/moved", "*/*") == page.encode()
        # The password is for the index alone, not for where it leads.
        assert heard[-2][1] and heard[-1] == ("localhost", None)
        pages["/files/shop_tools-1.0.tar.gz"] = b"other"
        path.unlink()
        with pytest.raises(MakeError, match="promises another archive"):
            sources.fetch("shop-tools==1.0", tmp_path / "sdists")
        with pytest.raises(MakeError, match="does not answer for /simple/none/"):
            sources.fetch("none==1", tmp_path / "sdists")
        server.shutdown()


@pytest.mark.parametrize("spec", ["shop", "shop>=1", "shop==1.*", "=="])
def test_a_package_is_named_with_its_version(spec: str, tmp_path: Path) -> None:
    with pytest.raises(MakeError, match="NAME==VERSION"):
        sources.fetch(spec, tmp_path)


def package_of(tmp_path: Path, files: dict[str, str]) -> Package:
    files = {"p/PKG-INFO": "Name: pluggy\nVersion: 1\n", **{f"p/src/{name}": text for name, text in files.items()}}
    sources.unpack(archive(tmp_path / "a.tar.gz", files), tmp_path / "tree")
    return sources.read(tmp_path / "tree", "0")


WORDS = [f"word{number}" for number in range(40)]


@pytest.mark.parametrize("kind", ["module", "package"])
@pytest.mark.parametrize(("count", "copied"), [(3, False), (19, False), (20, True), (40, True), (90, False)])
def test_a_copy_has_half_of_the_words_of_the_larger_one(count: int, copied: bool, kind: str, tmp_path: Path) -> None:
    """A few words of a tiny file are no copy of a large package, and no large package is one of a tiny file."""
    texts = {"pluggy.py": " ".join(WORDS)}
    other = " ".join([*WORDS, *(f"other{n}" for n in range(90))][:count])
    place, wanted = tmp_path / "venv/lib/_vendor", "pluggy.py"
    found = {"pluggy.py": other}
    if kind == "package":  # of which only the whole tells
        texts = {"pluggy/__init__.py": "", "pluggy/deep/a.py": " ".join(WORDS)}
        found, wanted = {"pluggy/__init__.py": "", "pluggy/b.py": other}, "pluggy"
    package = package_of(tmp_path, texts)
    for name, text in found.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    environment._python_files.cache_clear()
    assert environment.copies(package, tmp_path / "venv") == ([place / wanted] if copied else [])


def test_what_the_trainer_has_installed_is_no_copy(tmp_path: Path) -> None:
    """Boxes show the standard library, whose modules count, and not the site-packages of the trainer."""
    import heapq

    base = Path(heapq.__file__).parent
    package = package_of(tmp_path, {"heapq.py": Path(heapq.__file__).read_text(), "pip.py": "import pip"})
    assert [found for place in environment.BASES for found in environment.copies(package, place)] == [base / "heapq.py"]
    assert Path(sys.prefix) not in environment.BASES
    assert not [path for place in environment.BASES for path in environment._python_files(place)["__init__.py"]
                if "site-packages" in path.parts]  # fmt: skip


def test_a_copy_is_told_before_anything_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import heapq

    files = {"p/PKG-INFO": "Name: heapq\nVersion: 1\n", "p/heapq.py": Path(heapq.__file__).read_text()}
    path = archive(tmp_path / "heapq-1.tar.gz", files)
    monkeypatch.setattr(environment, "build", lambda *_: pytest.fail("it installs"))
    with pytest.raises(MakeError, match="would show an agent 1 copies"):
        prepare(str(path), tmp_path / "kept")


def test_requirements_that_only_egg_info_has_are_read(tmp_path: Path) -> None:
    about = "six\n\n[:python_version < '3']\nold\n\n[lint]\nruff\n\n[tests:python_version > '3']\nPyHamcrest>=2\n"
    files = {"pluggy/__init__.py": "", "pluggy.egg-info/requires.txt": about}
    package = package_of(tmp_path, files)
    assert package.requires == ("six",)
    (tmp_path / "tree/PKG-INFO").write_text("Name: pluggy\nVersion: 1\nProvides-Extra: tests\n")
    assert sources.read(tmp_path / "tree", "0").requires == ("six", "PyHamcrest>=2")


@pytest.mark.parametrize(
    ("broken", "reasons", "said"),
    [
        ((("t.py", "E   ModuleNotFoundError: No module named 'yaml.loader'"),), {}, "need yaml.loader; name"),
        ((), {"t.py::a": "ModuleNotFoundError: No module named 'six'"}, "need six; name the packages"),
        ((), {}, "pytest finds no test in its source distribution; choose another"),
        ((), {"t.py::a": "OSError: x", "t.py::b": "OSError: x"}, "none of its 2 tests passes each time: OSError: x (2"),
    ],
)  # fmt: skip
def test_what_is_missing_has_an_advice_of_its_own(broken: Any, reasons: dict[str, str], said: str) -> None:
    tests = dict.fromkeys(reasons, "failed")
    assert said in _no_test(runs.SuiteResult(tests, (), broken, {}, 1.0, (), reasons))
