"""This module has the configs that vLLM makes of the engine arguments that verl makes of our experiments, on pretended
H100s.

    python -m tests.engine_configs DIRECTORY < cases.json > facts.json

Cases are lists of overrides of ``rl.train``, by name. Of each one, the facts are attributes of vLLM's config, or
``{"refused": why}``; "places" says where the modules came from. DIRECTORY gets the models, and is in PYTHONPATH: it
tells vLLM of the pretended platform (tests.h100). This is a program because vLLM chooses its platform once per process.

Pretended are the platform, Ray's job id and the models' tokenizers. The rest is real: our configs, verl's replica and
its server up to the start of the engine, vLLM's command line and ``create_engine_config``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from argparse import Namespace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FACTS = (
    "model_config.max_model_len",
    "model_config.logprobs_mode",
    "model_config.enable_sleep_mode",
    "model_config.enable_return_routed_experts",
    "parallel_config.tensor_parallel_size",
    "parallel_config.world_size_across_dp",
    "parallel_config.enable_expert_parallel",
    "scheduler_config.max_num_seqs",
    "scheduler_config.max_num_batched_tokens",
    "cache_config.enable_prefix_caching",
    "cache_config.gpu_memory_utilization",
    "load_config.load_format",
)


def announce(directory: Path) -> None:
    """Make a directory a distribution whose plugin is the platform."""
    info = directory / "h100-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: h100\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nh100 = tests.h100:class_name\n")


def write_model(directory: Path, name: str) -> Path:
    """Write the config of a model whose shape rl.plan knows, and a small tokenizer.

    Where rl.plan knows the text part of a model that also sees images, it is put into a whole config, as published.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    from rl.plan.model import load_config
    from rl.quickstart.policy import make_tokenizer

    path = directory / Path(name).name
    if not path.exists():
        config = load_config(name)
        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.model_type.endswith("_text"):
            names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            config = AutoConfig.for_model(config.model_type.removesuffix("_text"), text_config=config.to_dict())
        config.update({"architectures": [names[config.model_type]], "dtype": "bfloat16"})
        config.save_pretrained(path)
        make_tokenizer(["a text"]).save_pretrained(path)
    return path


def engine_config(overrides: list[str], directory: Path) -> Any:
    """Return vLLM's config for a replica of an experiment, as verl's server is given it to start the engine."""
    from omegaconf import OmegaConf
    from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rl.config.compose import compose

    class Server(vLLMHttpServer):
        """verl's server, which makes the engine's config, as its own does, and no engine."""

        async def run_server(self, args: Namespace) -> None:
            arguments = AsyncEngineArgs.from_cli_args(args)
            self.made = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)

    config = compose(["run.dir=/nowhere", *overrides])
    parts = config.actor_rollout_ref
    parts.model.path = str(write_model(directory, parts.model.path))
    OmegaConf.resolve(config)
    replica = get_rollout_replica_class(parts.rollout.name)(
        replica_rank=0, config=parts.rollout, model_config=parts.model, gpus_per_node=parts.rollout.n_gpus_per_node
    )
    gpus = replica.gpus_per_replica_node
    server = Server(
        config=replica.config,
        model_config=replica.model_config,
        rollout_mode=RolloutMode.HYBRID,
        workers=[None] * gpus,
        replica_rank=0,
        node_rank=0,
        gpus_per_node=gpus,
        nnodes=replica.nnodes,
        cuda_visible_devices=",".join(map(str, range(gpus))),
    )
    asyncio.run(server.launch_server())
    return server.made


def facts(made: Any) -> dict[str, Any]:
    """Return what the tests look at, with the attention that vLLM would choose for the model."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    model = made.model_config
    with set_current_vllm_config(made):
        attention = get_attn_backend(model.get_head_size(), model.dtype, made.cache_config.cache_dtype)
        version = get_flash_attn_version(head_size=model.get_head_size())
    found = {name: attrgetter(name)(made) for name in FACTS}
    lora = made.lora_config
    found["lora"] = lora and {"rank": lora.max_lora_rank, "targets": lora.target_modules}
    found["attention"] = f"{attention.get_name()} {version}"
    return found


def places(package: str) -> list[str]:
    """Return the directory of an imported package, and the files of its modules that lie elsewhere."""
    home = str(Path(str(sys.modules[package].__file__)).parent)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == package]
    files = [file for module in modules if (file := getattr(module, "__file__", None))]
    return [home, *(file for file in files if not file.startswith(f"{home}/"))]


def main() -> None:
    """Read cases, write their facts."""
    import ray

    directory, cases = Path(sys.argv[1]), json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # verl prints the command line, vLLM its log
    announce(directory)
    ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "01000000")
    results: dict[str, Any] = {}
    for name, overrides in cases.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                results[name] = facts(engine_config(overrides, directory))
        except (Exception, SystemExit) as error:  # SystemExit: the parser of the command line has said why
            results[name] = {"refused": f"{type(error).__name__}: {error}\n{said.getvalue()[-2000:]}"}
    results["places"] = {package: places(package) for package in ("vllm", "transformers")}
    json.dump(results, out, default=str)


if __name__ == "__main__":
    main()
