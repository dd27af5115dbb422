"""rl.boxes: each thing that can be wrong with boxes is one clear line, before one is booted."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError
from omegaconf import DictConfig

from apptainer_boxes import cli as apptainer_cli
from rl.checks import check
from rl.episodes import boxes as box_checks
from rollout.sandbox.docker.engine import PROJECT, ContainerEngine, get_engine
from tests.check_kit import good_config, refused, write
from tests.datasets import snapshot_row as row
from tests.packages_kit import APPTAINER, install
from tests.unit.rewards.test_grade import task


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


# --- sandbox=local


def test_bwrap_that_is_not_installed(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    check(config)
    refused(config, "bubblewrap is missing", "isolation=auto", sandbox__isolation="bwrap")


def test_bwrap_that_does_not_start(config, monkeypatch):
    monkeypatch.setattr(box_checks.shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(box_checks.bwrap, "_flavour", lambda: None)
    refused(config, "user namespaces are forbidden", sandbox__isolation="bwrap")


# --- sandbox=docker


@pytest.fixture
def docker_cfg(config: DictConfig) -> DictConfig:
    keys = {"kind": "docker", "memory_mb": 512, "cpus": 1, "processes": 64, "disk_mb": 64, "pull_parallel": 1}
    del config.sandbox.isolation
    images = {"image_budget_gb": None, "base_image": None, "registry_mirror": None, "pull_patience_s": 0}
    config.sandbox = {**config.sandbox, **keys, **images}
    return config


def test_an_engine_that_does_not_answer(docker_cfg: DictConfig, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(box_checks, "get_engine", lambda: ContainerEngine())
    refused(docker_cfg, "sandbox=docker", "no_engine", "none.sock", "DOCKER_HOST")
    refused(docker_cfg, "sandbox.cpus", sandbox__cpus=0)


@pytest.fixture
def image() -> Iterator[str]:
    """The name of an image of the engine's, with nothing in it."""
    name, tag = f"{PROJECT}/test-empty", str(os.getpid())
    get_engine().client.import_image_from_data(bytes(10240), repository=name, tag=tag)  # an empty tar archive
    yield f"{name}:{tag}"
    get_engine().client.remove_image(f"{name}:{tag}")


@pytest.mark.docker
def test_images_are_there_or_can_be_pulled(docker_cfg: DictConfig, tmp_path: Path, image: str) -> None:
    refused(docker_cfg, "train-0", "local snapshot", "sandbox.base_image")
    refused(docker_cfg, "sandbox.base_image", "no/such:1", sandbox__base_image="no/such:1")
    docker_cfg.sandbox.base_image = image
    check(docker_cfg)
    docker_cfg.sandbox.base_image = None
    held_out = write(tmp_path / "held_out.parquet", [row("val-0", image=image)])
    here = write(tmp_path / "here.parquet", [row(f"train-{i}", image=image) for i in range(8)])
    docker_cfg.data.update({"train_files": here, "val_files": held_out})
    check(docker_cfg)
    lost = write(tmp_path / "lost.parquet", [row(f"train-{i}", image="localhost:1/no/such:1") for i in range(8)])
    # At a port that nothing listens at. Podman is not asked, for it can only pull.
    if not get_engine().podman:
        refused(docker_cfg, "sandbox=docker", "localhost:1", data__train_files=lost)


# --- sandbox=ssh


@pytest.fixture
def ssh_cfg(docker_cfg: DictConfig) -> DictConfig:
    keys = {"kind": "rl.episodes.ssh:Ssh", "hosts": ["127.0.0.1:1"], "ssh_config": "/dev/null", "per_host": 16}
    docker_cfg.sandbox = {**docker_cfg.sandbox, **keys}
    return docker_cfg


def test_hosts_that_cannot_be_used(ssh_cfg: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ssh_cfg, "sandbox.hosts", sandbox__hosts=[])
    refused(ssh_cfg, "sandbox.per_host", sandbox__per_host=0)
    ssh_cfg.sandbox.hosts, ssh_cfg.sandbox.per_host = ["127.0.0.1:1"], 16
    if shutil.which("ssh"):
        refused(ssh_cfg, "sandbox.hosts: 127.0.0.1:1: ", "Connection refused")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(ssh_cfg, "sandbox=ssh", "no program ssh", "openssh-client")


# --- sandbox=apptainer


@pytest.fixture
def apptainer_cfg(config: DictConfig, tmp_path: Path, monkeypatch) -> DictConfig:
    install(APPTAINER, tmp_path / "installed", monkeypatch)
    stub(tmp_path, monkeypatch, "apptainer version 1.3.4")
    keys = {"kind": "apptainer_boxes.kind:Apptainer", "memory_mb": 512, "cpus": 1, "processes": 64, "pull_parallel": 1}
    more = {"image_budget_gb": None, "base_image": "/base.sif", "cache_dir": str(tmp_path / "cache" / "sif")}
    more |= {"registry_mirror": None, "pull_patience_s": 0}
    del config.sandbox.isolation, config.sandbox.disk_mb
    config.sandbox = {**config.sandbox, **keys, **more}
    (tmp_path / "base.sif").touch()
    config.sandbox.base_image = str(tmp_path / "base.sif")
    return config


def stub(tmp_path: Path, monkeypatch, version: str | None) -> None:
    """The only program on the PATH says that it is this version; None: there is none."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "apptainer"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755 if version else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    apptainer_cli.program.cache_clear()


def test_a_run_with_a_mirror_asks_the_mirror_and_may_wait_for_it(
    docker_cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not ended by Docker Hub, which it may not reach, nor by a mirror that refuses for now."""
    asked = []

    def inspect(image: str) -> None:
        asked.append(image)
        raise APIError(f"toomanyrequests: {image}")

    engine: Any = SimpleNamespace(podman=False, client=SimpleNamespace(inspect_distribution=inspect))
    monkeypatch.setattr(box_checks, "get_engine", lambda: engine)
    monkeypatch.setattr(box_checks.docker_images, "missing", lambda engine, images: list(images))
    docker_cfg.sandbox.update({"registry_mirror": "harbor.site/hub", "pull_patience_s": 60})
    box_checks.Docker(docker_cfg.sandbox).check_tasks([task(image="swebench/x:1")])
    assert asked == ["harbor.site/hub/swebench/x:1"]


def test_apptainer_is_there_and_new_enough(apptainer_cfg: DictConfig, tmp_path: Path, monkeypatch) -> None:
    check(apptainer_cfg)
    assert not (tmp_path / "cache").exists()
    stub(tmp_path, monkeypatch, "apptainer version 1.0.3")
    refused(apptainer_cfg, "sandbox=apptainer", "1.0", "1.2 or later")
    stub(tmp_path, monkeypatch, None)
    refused(apptainer_cfg, "sandbox=apptainer", "on the PATH", "module")


def test_apptainers_images_and_cache(apptainer_cfg: DictConfig, tmp_path: Path) -> None:
    refused(apptainer_cfg, "sandbox.cpus", sandbox__cpus=0)
    apptainer_cfg.sandbox.cpus = 1
    (tmp_path / "file").touch()
    refused(apptainer_cfg, "sandbox.cache_dir", str(tmp_path / "file"), sandbox__cache_dir=str(tmp_path / "file" / "x"))
    apptainer_cfg.sandbox.cache_dir = str(tmp_path)
    refused(apptainer_cfg, "sandbox.base_image", "none.sif", sandbox__base_image=str(tmp_path / "none.sif"))
    apptainer_cfg.sandbox.base_image = None
    refused(apptainer_cfg, "train-0", "local snapshot", "sandbox=apptainer", "sandbox.base_image")
