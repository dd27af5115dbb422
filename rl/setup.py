"""The episode's parts from the config. Imports neither verl nor vLLM until they are made."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.rules import Rules
from rewards.shape import Shape
from rewards.task import Task
from rollout.agent import Agent
from rollout.agent.claude_code import ClaudeCode
from rollout.episode import Boot, Setup
from rollout.proxy.engine import Engine
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.parsers import VllmReplyParser
from rollout.proxy.render import ChatTemplateRenderer, end_ids, generation_config
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy
from rollout.sandbox import Sandbox
from rollout.sandbox.apptainer import box as apptainer
from rollout.sandbox.apptainer import images as apptainer_images
from rollout.sandbox.directory import Limits
from rollout.sandbox.docker import box as docker
from rollout.sandbox.docker import images
from rollout.sandbox.local.box import boot_local

# How each kind of agent (``agent.kind``) is made, from the values of its configs/agent/*.yaml and the limits of a reply
# and of the context. Raises FileNotFoundError when the agent's program is not there.
AGENTS: dict[str, Callable[..., Agent]] = {"claude_code": ClaudeCode.of}


def agent_from(config: DictConfig, max_tokens: int, max_context: int) -> Agent:
    """Return the agent of a config. Raises ValueError for an unknown kind and FileNotFoundError without its program."""
    settings: dict[str, Any] = OmegaConf.to_container(config.agent, resolve=True)
    kind = settings.pop("kind", "claude_code")  # configs of earlier runs do not name it
    if kind not in AGENTS:
        raise ValueError(f"agent.kind is {kind!r}; it must be one of {', '.join(AGENTS)}")
    return AGENTS[kind](max_tokens=max_tokens, max_context=max_context, **settings)


def agent_config(config: DictConfig) -> Agent:
    max_tokens = config.proxy.max_tokens or config.data.max_response_length
    return agent_from(config, max_tokens, config.actor_rollout_ref.rollout.max_model_len)


def boot_from(config: DictConfig, binary: Path) -> Boot:
    kinds = {"local": _boot_local, "docker": _boot_docker, "apptainer": _boot_apptainer}
    return kinds[config.sandbox.kind](config, binary)


def _boot_local(config: DictConfig, binary: Path) -> Boot:
    box = config.sandbox
    limits = Limits(cpu_s=box.cpu_s, file_bytes=box.file_mb << 20)

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        """A box for the agent, which finds its binary there, or without ``socket_dir`` one for grading."""
        binds = {binary: str(binary)} if socket_dir else None
        return await boot_local(
            task.snapshot, isolation=box.isolation, limits=limits, binds=binds, socket_dir=socket_dir
        )

    return boot


def rules_from(config: DictConfig) -> Rules:
    """What of a patch is graded, and what of it is flagged. Raises ValueError, whose message begins with the key."""
    grading = OmegaConf.to_container(config.grading, resolve=True)
    try:
        return Rules(grading["drop"], grading["flags"])
    except ValueError as error:
        raise ValueError(f"grading.flags: {error}") from error


def shape_from(config: DictConfig) -> Shape | None:
    """The reward's shape, None for the outcome's own. Raises ValueError, whose message begins with the key."""
    try:
        return Shape.of(**config.grading.reward)
    except ValueError as error:
        raise ValueError(f"grading.reward: {error}") from error


def _boot_docker(config: DictConfig, binary: Path) -> Boot:
    box = config.sandbox
    limits = docker.Limits(
        memory_bytes=box.memory_mb << 20,
        cpus=box.cpus,
        processes=box.processes,
        disk_bytes=box.disk_mb << 20,
        cpu_s=box.cpu_s,
        file_bytes=box.file_mb << 20,
    )
    run = Path(config.run.dir).name if config.run.dir else ""
    budget = image_budget(config)

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        """A box for the agent, which finds its binary there, or without ``socket_dir`` one for grading."""
        local = is_snapshot(task)
        return await docker.boot_docker(
            images.Source(box.base_image) if local else images.Source.of(task, grading=socket_dir is None),
            snapshot=task.snapshot if local else None,
            limits=limits,
            binds={binary: str(binary)} if socket_dir else None,
            socket_dir=socket_dir,
            run=run,
            budget_bytes=budget,
        )

    return boot


def _boot_apptainer(config: DictConfig, binary: Path) -> Boot:
    box = config.sandbox
    limits = apptainer.Limits(
        memory_bytes=box.memory_mb << 20,
        cpus=box.cpus,
        processes=box.processes,
        cpu_s=box.cpu_s,
        file_bytes=box.file_mb << 20,
    )
    cache = sif_cache(config)

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        """A box for the agent, which finds its binary there, or without ``socket_dir`` one for grading."""
        local = is_snapshot(task)
        return await apptainer.boot_apptainer(
            images.Source(box.base_image) if local else images.Source.of(task, grading=socket_dir is None),
            cache,
            snapshot=task.snapshot if local else None,
            limits=limits,
            binds={binary: str(binary)} if socket_dir else None,
            socket_dir=socket_dir,
        )

    return boot


def sif_cache(config: DictConfig) -> apptainer_images.Cache:
    """Of sandbox=apptainer."""
    directory = Path(config.sandbox.cache_dir).expanduser().absolute()
    return apptainer_images.Cache(directory, image_budget(config))


def is_snapshot(task: Task) -> bool:
    """Whether a task's image is a directory of this machine."""
    return task.image.startswith("dir:")


def image_budget(config: DictConfig) -> int | None:
    """Bytes, None without a limit."""
    budget = config.sandbox.image_budget_gb
    return None if budget is None else int(budget * 2**30)


def prepare_images(
    config: DictConfig,
    tasks: Iterable[Task],
    say: Callable[[str], None],
    count: Callable[[int, int], None] | None = None,
) -> None:
    """Pull and seal the images of a run's tasks ahead, and write what was found in them that could tell an answer to
    images.json in the run directory. ``say`` and ``count`` hear how it goes. Raises SandboxError."""
    wanted = [wanted for task in tasks if not is_snapshot(task) for wanted in images.Wanted.of(task)]
    if not wanted:
        return
    parallel = config.sandbox.pull_parallel
    if config.sandbox.kind == "apptainer":
        making = apptainer_images.prepare(sif_cache(config), wanted, parallel=parallel, say=say, count=count)
    else:
        making = images.prepare(wanted, parallel=parallel, budget_bytes=image_budget(config), say=say, count=count)
    reports = asyncio.run(making)
    (Path(config.run.dir) / "images.json").write_text(json.dumps(reports, indent=1) + "\n")
    if found := sum(bool(report["residue"]) for report in reports.values()):
        say(f"images: {found} have something in them that could tell the answer; see images.json")


def side_endpoint(config: DictConfig) -> SideEndpoint | None:
    if config.proxy.side_calls != "forward":
        return None
    side = config.proxy.side_endpoint
    return SideEndpoint(side.url, side.model, os.environ.get(side.key_env) if side.key_env else None)


def make_setup(config: DictConfig, tokenizer: Any, model_type: str, engine: Engine, proxy: ProxyServer) -> Setup:
    """Everything that an episode of this run needs. ``model_type``: of the policy's config.json."""
    policy = Policy(
        engine=engine,
        renderer=ChatTemplateRenderer(tokenizer, model_type, any_family=config.proxy.any_family),
        parser=VllmReplyParser(config.proxy.tool_parser, config.proxy.reasoning_parser, tokenizer),
        tokenizer=tokenizer,
        end_ids=end_ids(tokenizer, generation_config(config.actor_rollout_ref.model.path)),
        max_tokens=agent_config(config).max_tokens,
        max_context=config.actor_rollout_ref.rollout.max_model_len,
        train_side_calls=config.proxy.side_calls == "train",
        side_endpoint=side_endpoint(config),
    )
    return setup_around(config, policy, proxy)


def setup_around(config: DictConfig, policy: Policy, proxy: ProxyServer) -> Setup:
    """Everything but the policy and the proxy that it is reached through."""
    agent = agent_config(config)
    return Setup(
        policy=policy,
        proxy=proxy,
        boot=boot_from(config, agent.binary),
        agent=agent,
        grade_timeout_s=config.grading.timeout_s,
        rules=rules_from(config),
        shape=shape_from(config),
        infra_retries=config.episode.infra_retries,
        scratch=Path(scratch) if (scratch := os.environ.get("RL_SOCKET_DIR")) else None,
    )
