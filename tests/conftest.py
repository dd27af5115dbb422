"""Skips by what the machine has (the marks are declared in pyproject.toml); what tests of all boxes share."""

import functools
import gc
import importlib.metadata
import io
import os
import pickle
import random
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from omegaconf import OmegaConf

from rollout.sandbox import SandboxError
from tests.lacks import lacks, slurm_problem

ROOT = Path(__file__).parents[1]

# The cyclic garbage collector takes a seventh of the time: it looks again and again at what imports have made.
gc.disable()

# A timing is never a test.
hypothesis.settings.register_profile("timeless", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("timeless")


# Ray keeps the first token that a process uses, for all clusters that it starts; without one it writes it to the home
# directory.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# vLLM's API server imports a package that gives the root logger this level, which is ERROR without the variable: no
# test that is run afterwards by the same worker would see a warning.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(0)  # all is reported; Python would take ten seconds to free what it has imported
    gc.unfreeze()  # else libraries say at the end that their objects are never freed


def _read_once() -> None:
    """Let configs be composed of files that were read before: Hydra reads sixty for each, which is half the time."""
    load = OmegaConf.load
    known: dict[tuple[str, int, int], bytes] = {}

    def remembered(file: Any) -> Any:
        if not isinstance(file, io.TextIOWrapper):
            return load(file)
        now = os.fstat(file.fileno())
        key = (file.name, now.st_mtime_ns, now.st_size)
        if key not in known:
            known[key] = pickle.dumps(load(file))
        return pickle.loads(known[key])

    OmegaConf.load = remembered


_read_once()


def _alone() -> None:
    """Let no package count that somebody has installed beside this project: configs would have its choices, too."""
    find, installed = importlib.metadata.entry_points, Path(sysconfig.get_path("purelib"))

    def found(**wanted: Any) -> Any:
        points = find(**wanted)
        if wanted.get("group") != "claude_code_rl.configs":
            return points
        return [point for point in points if point.dist is None or Path(point.dist.locate_file("")) != installed]

    importlib.metadata.entry_points = found


_alone()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Each test leaves the environment as it was, also one that has run a program in this process (rl.evaluate)."""
    before, temporary = dict(os.environ), tempfile.tempdir
    yield
    tempfile.tempdir = temporary
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@functools.cache
def _works(*argv: str) -> bool:
    """Return whether the command exists and succeeds."""
    return shutil.which(argv[0]) is not None and subprocess.run(argv, capture_output=True).returncode == 0


# Files that train, in two groups of about the same length: of three training runs at a time, each takes more CPU time,
# because processes that wait for each other spin.
TRAINERS = {
    "trainers-1": ("test_train", "test_run_faults", "test_joined_ray", "test_experiments"),
    "trainers-2": ("test_gpu_ladder", "test_slurm_parts", "test_slurm"),
}
GROUPS = {
    **TRAINERS,
    "vllm": ("test_collect", "test_store"),  # with agentlightning, whose import takes 10 s
}
# Groups in the order in which they begin: one that begins late goes on alone at the end.
FIRST = (
    *TRAINERS,
    *("vllm", "test_sft_other", "test_sft", "test_slurm_nodes", "test_store_server", "podman", "test_functions"),
)
NEEDS = {
    "bwrap": ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"),
    "podman": ("sh", "-c", "command -v podman && test $(id -u) = 0"),
}


@functools.cache
def _engine_problem() -> str:
    """Why no container engine can be used, "" if one can."""
    from rollout.sandbox.docker.engine import get_engine

    try:
        get_engine()
    except SandboxError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, problem in (("docker", _engine_problem), ("slurm", slurm_problem)):
        if item.get_closest_marker(mark) and (words := problem()):
            lacks(words)
    for mark, command in NEEDS.items():
        if item.get_closest_marker(mark) and not _works(*command):
            lacks(f"`{' '.join(command)}` does not work")
    if item.get_closest_marker("gpu") and not _works("nvidia-smi", "-L"):
        pytest.skip("no NVIDIA GPU")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Share the tests out to workers (pytest-xdist, ``--dist loadgroup``) file by file; several may be one group."""
    if item.get_closest_marker("xdist_group") is None:
        groups = [group for group, files in GROUPS.items() if item.path.stem in files]
        item.add_marker(pytest.mark.xdist_group(*groups or [item.path.stem]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that take longest first.

    A worker that has two tests left gets its next group, so those two should be short.
    """

    def rank(item: pytest.Item) -> tuple[bool, int, int, bool]:
        (group,) = next(item.iter_markers("xdist_group")).args
        files = GROUPS.get(group, ())
        return (
            item.get_closest_marker("last") is not None,
            FIRST.index(group) if group in FIRST else len(FIRST),
            files.index(item.path.stem) if item.path.stem in files else -1,
            item.get_closest_marker("engine") is None,
        )

    items.sort(key=rank)


@pytest.fixture
def nap() -> str:
    """A duration for `sleep` that no other process has."""
    return f"{random.randrange(10**4, 10**5)}.{random.randrange(10**6, 10**7)}"
