"""Source distributions are hostile archives: what is unpacked, what is read of them, and where they come from."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import tarfile
import threading
from pathlib import Path
from types import ModuleType

import pytest

from rl.make import environment, sources
from rl.make.sources import MakeError, Package

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
        '[dependency-groups]\ntest = ["pytest-cov", {include-group = "base"}]\nbase = ["pyyaml"]\n'
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
    files["requirements-test.txt"] = "freezegun>=1  # time\n-r other.txt\n\n# no\n"
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
    pages = {"/simple/shop-tools/": page.encode(), "/files/shop_tools-1.0.tar.gz": content}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = pages.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:word@127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        path, found = sources.fetch("Shop.Tools==1.0", tmp_path / "sdists")
        assert (path.read_bytes(), found) == (content, digest)
        with pytest.raises(MakeError, match="has no source distribution"):
            sources.fetch("shop-tools==3.0", tmp_path / "sdists")
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


def read_as(module: ModuleType, tmp_path: Path) -> Package:
    """A package that is a copy of an installed module."""
    name, text = module.__name__, Path(str(module.__file__)).read_text()
    files = {"PKG-INFO": f"Name: {name}\nVersion: 1\n", f"src/{name}/__init__.py": text}
    sources.unpack(
        archive(tmp_path / "a.tar.gz", {f"p/{path}": text for path, text in files.items()}), tmp_path / "tree"
    )
    return sources.read(tmp_path / "tree", "0")


def test_what_boxes_hide_of_the_trainers_packages_is_no_copy(tmp_path: Path) -> None:
    import libcst

    assert environment.copies(read_as(libcst, tmp_path), tmp_path / "venv") == []


def test_copies_that_a_box_would_show_are_found(tmp_path: Path) -> None:
    import pluggy

    tree = tmp_path / "tree"
    package = read_as(pluggy, tmp_path)
    assert Path(pluggy.__file__) in environment.copies(package, tmp_path / "venv")
    (tree / "src/pluggy/__init__.py").write_text("something = entirely + different\nwords_of_its_own = 1\n")
    assert not environment.copies(package, tmp_path / "venv")
    vendored = tmp_path / "venv/lib/other/_vendor/pluggy/__init__.py"
    vendored.parent.mkdir(parents=True)
    vendored.write_text("something = entirely + different\n")
    environment._python_files.cache_clear()
    assert environment.copies(package, tmp_path / "venv") == [vendored]
