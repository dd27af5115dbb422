from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from rollout.sandbox import Sandbox
from tests import kube_kit as clusters
from tests.boxes.kinds import KINDS, BoxKit, param
from tests.docker_kit import base_image, small_image
from tests.kube_kit import Cluster
from tests.own_engine import OwnPodman, running
from tests.sandboxes import history
from tests.ssh_kit import Sshd, servers


@pytest.fixture(autouse=True)
def _drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second opinion draw by the test's name, and differently from one grading of a test to the next.

    Some cheats get through in a share of all draws, which docs/rewards.md names.
    """
    count = itertools.count()

    def token(length: int) -> str:
        name = f"{request.node.nodeid} {next(count)}"
        return hashlib.sha256(name.encode()).hexdigest()[: 2 * length]

    monkeypatch.setattr("rewards.second.secrets", SimpleNamespace(token_hex=token))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work tree of boxes, as a repository with a history to hide."""
    return history(tmp_path_factory.mktemp("history") / "repository")


@pytest.fixture(scope="session")
def own_podman() -> Iterator[OwnPodman]:
    """A podman of the session's own, with `small_image` from the machine's Docker engine."""
    with running(OwnPodman, small_image(), data_mb=2000) as started:
        yield started


@pytest.fixture(scope="session")
def own_sshd() -> Iterator[list[Sshd]]:
    """Two SSH servers of the session's own, which lead to this machine."""
    with servers(2) as started:
        yield started


@pytest.fixture(scope="session")
def own_cluster() -> Iterator[Cluster]:
    """A Kubernetes cluster of the session's own, with the small image and the base image."""
    with clusters.running(small_image(), base_image()) as started:
        yield started


@pytest.fixture(scope="session")
def kits() -> dict[str, BoxKit]:
    """The kits that the session has made, by kind: their images are sealed once."""
    return {}


@pytest.fixture(scope="module", params=[param(name) for name in KINDS])
def kind(
    request: pytest.FixtureRequest,
    kits: dict[str, BoxKit],
    repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BoxKit]:
    """A kind of box, ready to boot; all tests of a module are run with one kind before the next."""
    name = request.param
    if name not in kits:
        kits[name] = KINDS[name][0](name, repository, tmp_path_factory.mktemp(name))
    with kits[name].ready(request):
        yield kits[name]
        assert kits[name].left() == []


@pytest_asyncio.fixture
async def box(kind: BoxKit) -> AsyncIterator[Sandbox]:
    """A box of the test's own."""
    made = await kind.boot()
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(kind: BoxKit) -> AsyncIterator[Sandbox]:
    """One box for all tests of a module that leave it as it was; they share its event loop."""
    made = await kind.boot()
    yield made
    await made.close()
