"""The kind of box that ``sandbox=kubernetes`` names: what its config group means, and what is wrong before a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kubernetes_boxes.box import Pods, boot_pod
from kubernetes_boxes.cluster import Cluster
from rewards.task import Task
from rl.config.compose import ConfigError
from rl.episodes.boxes import Count, FromImages, Say
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.sealing import Wanted


class Kubernetes(FromImages):
    """Boxes are pods of a cluster, whose nodes pull the images."""

    numbers = ("memory_mb", "cpus", "disk_mb", "cpu_s", "file_mb", "concurrency", "lifetime_s", "boot_s")
    speed_only = ("concurrency", "boot_s")

    @property
    def pods(self) -> Pods:
        """Return how pods are made."""
        box = self.sandbox
        plain = {key: OmegaConf.to_container(box[key]) if box[key] else None for key in ("requests", "more")}
        where = {key: box[key] for key in ("namespace", "kubeconfig", "context", "lifetime_s", "boot_s")}
        return Pods(**where, **plain)

    def check(self) -> None:
        """Raise ConfigError if the cluster does not answer, or this user may not see pods there."""

        async def ask() -> None:
            cluster = await Cluster.connect(self.pods.kubeconfig, self.pods.context, self.pods.namespace)
            try:
                await cluster.boxes()
            finally:
                await cluster.close()

        try:
            asyncio.run(ask())
        except SandboxError as error:
            raise ConfigError(f"sandbox=kubernetes: {error}; see sandbox.kubeconfig and sandbox.namespace") from error

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a pod; see ``Kind.boot_box``."""
        return await boot_pod(**self.made_from(task, grading), pods=self.pods, run=run, **common)

    async def prepare(self, wanted: Sequence[Wanted], say: Say, count: Count | None = None) -> dict[str, dict]:
        """Do nothing: nodes pull the images, and each box seals its own work tree."""
        return {}

    def missing(self, wanted: Sequence[Wanted]) -> list[str]:
        """Return none: it is the nodes that have images."""
        return []

    def store(self) -> Path | None:
        """Return None: images are on the nodes."""
        return None
