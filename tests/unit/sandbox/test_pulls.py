"""This module tests where images are pulled from, what is waited for, how large they are, and the parts of an array
job.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.config.compose import ConfigError
from rl.episodes.boxes import check_room, kind_of
from rl.run.array_job import Shard
from rollout.sandbox.pulls import HUB, Pulls, refused_for_now, split
from rollout.sandbox.registry import estimate, layers
from rollout.sandbox.sealing import Source, Wanted
from tests.check_kit import composed
from tests.packages_kit import APPTAINER, install

GIB = 2**30


@pytest.mark.parametrize(
    ("image", "host", "path"),
    [
        ("python:3.11", HUB, "library/python:3.11"),
        ("swe/x.y_1:latest", HUB, "swe/x.y_1:latest"),
        ("docker.io/swe/x", HUB, "swe/x"),
        ("ghcr.io/swe/x:1", "ghcr.io", "swe/x:1"),
        ("localhost/x", "localhost", "x"),
        ("127.0.0.1:5000/a/x", "127.0.0.1:5000", "a/x"),
    ],
)
def test_a_mirror_has_the_images_of_docker_hub_only(image: str, host: str, path: str) -> None:
    assert split(image) == (host, path)
    mirrored = f"harbor.site/hub/{path}" if host == HUB else image
    assert Pulls("harbor.site/hub/").address(image) == mirrored and Pulls().address(image) == image
    assert Pulls("harbor.site/hub").address(f"swe/x@sha256:{'0' * 64}").startswith("swe/x@")


def test_a_pull_waits_longer_each_time_and_not_for_ever() -> None:
    assert list(Pulls().waits()) == [] and list(Pulls(patience_s=50).waits()) == [15, 30, 5]
    assert sum(Pulls(patience_s=21600).waits()) == 21600 and max(Pulls(patience_s=21600).waits()) == 600


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("toomanyrequests: You have reached your pull rate limit", True),
        ("received unexpected HTTP status: 503 Service Unavailable", True),
        ("Client.Timeout exceeded while awaiting headers", True),
        ("manifest for swe/x:1 not found: manifest unknown", False),
        ("pull access denied for swe/x1503, repository does not exist", False),
        ("no space left on device", False),
    ],
)
def test_only_what_may_pass_is_waited_for(error: str, again: bool) -> None:
    assert refused_for_now(error) is again


@contextlib.contextmanager
def registry(images: dict[str, dict[str, int]], refuse_after: int = 1000) -> Iterator[str]:
    """A registry that knows manifests only, behind a token, with an index of platforms; and after a while refuses."""
    served = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal served
            here = f"http://{self.headers['Host']}/token"
            if self.path.startswith("/token"):
                known = self.headers.get("Authorization") == f"Basic {base64.b64encode(b'me:secret').decode()}"
                return self.answer(200, {"token": "t" if known and "scope=pull" in self.path else "wrong"})
            if self.headers.get("Authorization") != "Bearer t":
                challenge = f'Bearer realm="{here}",service="s",scope="pull"'
                return self.answer(401, {}, {"WWW-Authenticate": challenge})
            name, _, reference = self.path.removeprefix("/v2/").partition("/manifests/")
            served += 1
            if served > refuse_after:
                return self.answer(429, {"errors": "toomanyrequests"})
            if name not in images:
                return self.answer(404, {})
            if not reference.startswith("sha256"):
                platforms = [("s390x", "sha256:other"), ("amd64", "sha256:this"), ("arm64", "sha256:this")]
                listed = [{"digest": one, "platform": {"architecture": kind}} for kind, one in platforms]
                return self.answer(200, {"manifests": listed})
            assert reference == "sha256:this"
            sized = [{"digest": digest, "size": size} for digest, size in images[name].items()]
            return self.answer(200, {"layers": sized})

        def answer(self, code: int, body: object, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path


def log_in(directory: Path, host: str) -> None:
    kept = {"auths": {host: {"auth": base64.b64encode(b"me:secret").decode()}}}
    (directory / "config.json").write_text(json.dumps(kept))


def test_sizes_are_asked_with_the_users_credentials(logged_in: Path) -> None:
    with registry({"hub/swe/x": {"sha256:a": 5, "sha256:b": 7}}) as host:
        with pytest.raises(OSError, match="401"):
            layers("swe/x:1", Pulls(f"{host}/hub"))
        log_in(logged_in, host)
        assert layers("swe/x:1", Pulls(f"{host}/hub")) == {"sha256:a": 5, "sha256:b": 7}
        with pytest.raises(OSError, match=f"{host}/none: {host}: HTTP Error 404"):
            layers(f"{host}/none", Pulls())


def test_a_sample_stands_for_all_and_shared_layers_count_once(logged_in: Path) -> None:
    images = {f"i{number}": {"sha256:base": 100, f"sha256:{number}": 10} for number in range(40)}
    with registry(images, refuse_after=20) as host:
        log_in(logged_in, host)
        names = [f"{host}/{name}:1" for name in images]
        found = estimate(names, lambda image: layers(image, Pulls()))
        assert found.asked == 10, "two questions each, until the registry refuses"
        assert found.compressed == 100 + 10 * 10 * 40 // 10
        with pytest.raises(OSError, match="429"):
            estimate(names, lambda image: layers(image, Pulls()))


def test_room_is_checked_before_anything_is_pulled(
    logged_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(APPTAINER, tmp_path / "installed", monkeypatch)
    sandbox = composed("sandbox=apptainer").sandbox
    sandbox.cache_dir = str(tmp_path / "cache")
    said: list[str] = []
    with registry({"small": {"sha256:a": GIB // 1024}, "large": {"sha256:b": GIB * 2**30}}) as host:
        log_in(logged_in, host)
        kind = kind_of(sandbox)
        check_room(kind, [Wanted("one", Source(f"{host}/small:1"))], said.append)
        assert said == ["images: 1 to pull; about 0.0 GiB to transfer, 0.0 GiB on disk, by the sizes of 1"]
        with pytest.raises(ConfigError, match=rf"^{tmp_path} has .* GiB free, and the images need about \d+"):
            check_room(kind, [Wanted("one", Source(f"{host}/large:1"))], said.append)
        sandbox.image_budget_gb = 0.001
        check_room(kind, [Wanted("one", Source(f"{host}/large:1"))], said.append)
    check_room(kind, [Wanted("one", Source("127.0.0.1:1/gone:1"))], said.append)
    assert said[-1].startswith("images: 1 to pull, of unknown size: 127.0.0.1:1/gone:1")


def test_a_shard_has_whole_groups() -> None:
    pieces = ["a1", "a2", "b1", "c1", "a3", "b2"]
    parts = [Shard.parse(f"{number}/2").of(pieces, lambda piece: piece[0]) for number in (1, 2)]
    assert parts == [["a1", "a2", "a3"], ["b1", "c1", "b2"]] and Shard.parse("1/1").of(pieces, str) == pieces
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(ValueError, match="is no shard; write its number"):
            Shard.parse(wrong)
