"""We still need what we change in verl, Ray, vLLM and TRL at run time, and docs/architecture.md lists all of it.

Each test shows the behaviour that a patch corrects. When one fails after an upgrade, its patch may go.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.config.compose import package_dir
from tests.unit.proxy import test_parsers

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {file: file.read_text() for top in ("rl", "rollout", "rewards") for file in (ROOT / top).rglob("*.py")}
needs_vllm_cpu = pytest.mark.skipif("cpu" not in importlib.metadata.version("vllm"), reason="vLLM is not its CPU build")
# Ways to reach into another library: what matches is a patch, and its file must be in the table.
REACHES = re.compile(
    r"\.__class__ = |\b_private\b|\._ROLLOUT_REGISTRY|\._acquire_server = |dist\.init_\w+ = "
    r"|getLogger\(.(verl|ray|vllm)|trainer_base\.\w+ = |\._stream_arg_deltas = "
    r"|__ray_metadata__|__ray_actor_class__|agent_loop_workers_class: Any = |role_worker_mapping\[.+\] = "
    r"|\.default_pg_timeout = |\._temp_dir = |\.get_mp_context = |\._run_in_subprocess = "
)


def table() -> list[list[str]]:
    """The rows of the table: what, where, why, version, test."""
    section = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## Patches at run time")[2].partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    return rows[2:]


def source_of(module: str) -> str:
    """A module's text, without importing it or its package."""
    package, _, inner = module.partition(".")
    return Path(package_dir(package), f"{inner.replace('.', '/')}.py").read_text()


def test_the_table_names_files_and_tests_that_exist() -> None:
    rows = table()
    assert len(rows) > 8
    for row in rows:
        assert len(row) == 5, row
        places, tests = re.findall(r"`([^`]+)`", row[1]), re.findall(r"`(test_\w+)`", row[4])
        assert places and tests, row
        for place in places:
            file, _, name = place.partition("::")
            assert not name or name in (ROOT / file).read_text(), place
        for test in tests:
            found = [file for file in (ROOT / "tests").rglob("test_*.py") if f"def {test}(" in file.read_text()]
            assert found, test


def test_nothing_reaches_into_a_library_that_the_table_does_not_name() -> None:
    listed = {place.partition("::")[0] for row in table() for place in re.findall(r"`([^`]+)`", row[1])}
    reaching = {str(file.relative_to(ROOT)) for file, text in SOURCES.items() if REACHES.search(text)}
    assert reaching <= listed


def overrides() -> Iterator[tuple[Path, str]]:
    """Yield (file, name) of each private method in rl/ that extends one of a library, or that only a library calls."""
    everything = "\n".join(SOURCES.values())
    for file, text in SOURCES.items():
        if file.relative_to(ROOT).parts[0] != "rl":  # of verl, Ray and TRL, rollout/ and rewards/ derive no class
            continue
        for node in ast.walk(ast.parse(text)):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not re.match(
                    "_[a-z]", method.name
                ):
                    continue
                own = re.search(rf"(?<!def )(?<!super\(\)\.)\b{method.name}\b", everything)
                if not own or f"super().{method.name}(" in ast.unparse(method):
                    yield file, method.name


def test_each_private_method_of_a_library_that_is_overridden_is_in_the_table() -> None:
    listed = {
        (place.partition("::")[0], text)
        for row in table()
        for place in re.findall(r"`([^`]+)`", row[1])
        for text in row
    }
    found = [(str(file.relative_to(ROOT)), name) for file, name in overrides()]
    assert len(found) > 15
    missing = [(file, name) for file, name in found if not any(file == own and name in text for own, text in listed)]
    assert missing == []


# --- the trainer


def test_verl_still_calls_the_private_methods_that_we_override() -> None:
    """A name that verl no longer calls would make an override of ours do nothing, without an error."""
    modules = ("trainer_base", "trainer_sync", "trainer_separate_async", "trainer_colocate_async", "replay_buffer")
    verl = "\n".join(source_of(f"verl.trainer.ppo.v1.{module}") for module in modules)
    names = {name for file, name in overrides() if file.name in ("trainer.py", "curriculum.py", "groups.py")}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"def {name}(" not in verl or f"self.{name}(" not in verl] == []
    assert "self._dapo_classification_cache[partition_id]" in verl


def test_verl_still_has_no_key_for_a_sampler() -> None:
    text = source_of("verl.trainer.ppo.utils")
    making = text[text.index("def create_rl_sampler(") :].partition("\ndef ")[0]
    assert set(re.findall(r"data_config\.(?:get\(.)?(\w+)", making)) == {"shuffle", "seed"}


def test_verls_worker_still_has_a_teacher_score_the_last_row_only() -> None:
    text = source_of("verl.trainer.ppo.v1.agent_loop_tq")
    method = text[text.index("def _agent_loop_postprocess(") :].partition("\nclass ")[0]
    assert "final_output = outputs[-1]" in method and method.count("self._compute_teacher_logprobs(") == 1
    assert "self._agent_loop_postprocess(" in source_of("verl.experimental.agent_loop.agent_loop")


def test_verls_worker_still_is_an_actor_with_its_class_inside() -> None:
    from ray.actor import ActorClass
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    from rl.train.distillation import ScoringWorker, scored

    assert isinstance(AgentLoopWorkerTQ, ActorClass)
    _, base = scored().__bases__
    assert scored().__bases__[0] is ScoringWorker
    assert base.__name__ == "AgentLoopWorkerTQ" and issubclass(base, AgentLoopWorker)


def test_verl_still_ends_the_separate_set_up_with_a_line_that_logging_refuses() -> None:
    text = source_of("verl.trainer.ppo.v1.trainer_separate_async")
    assert "flush=True" in text[text.index("def _setup(") :].partition("\n    def ")[0]
    with pytest.raises(TypeError, match="flush"):
        logging.Logger("any").info("", flush=True)  # ty: ignore[unknown-argument]


def test_verl_still_counts_rows_of_an_update_and_not_episodes() -> None:
    text = source_of("verl.trainer.ppo.v1.trainer_base")
    for name in ("_update_actor", "_get_required_batch_multiple"):
        method = text[text.index(f"def {name}(") :].partition("\n    def ")[0]
        assert re.search(r"mini_batch_size \*?= .*rollout\.n", method)


def test_verl_still_removes_an_old_checkpoint_before_the_new_one_is_whole() -> None:
    text = source_of("verl.utils.checkpoint.fsdp_checkpoint_manager")
    saving = text[text.index("def save_checkpoint(") :]
    assert 0 < saving.index("self.ensure_checkpoint_capacity(") < saving.index("torch.save(")


def test_verl_still_starts_two_groups_for_each_that_it_replaces() -> None:
    text = source_of("verl.trainer.ppo.v1.replay_buffer")
    assert "refill_credit += 2 * dapo_count + failed_count" in text
    assert "max(0, max_inflight_prompts - inflight_count)" in text


def test_verl_still_selects_from_a_set_of_names() -> None:
    text = source_of("verl.trainer.ppo.v1.replay_buffer")
    selecting = text[text.index("def _select_prompt_uids(") :].partition("\n    def ")[0]
    assert "sampleable_keys: set[str]" in selecting and "key=lambda key: prompt_global_steps_snapshot" in selecting
    # The order that we give it is the one in which TransferQueue first saw the names.
    assert "for key, index in partition.keys_mapping.items()" in source_of("transfer_queue.controller")


# --- Ray


def test_ray_still_puts_its_own_handler_for_sigterm() -> None:
    from ray._private import worker

    assert "set_sigterm_handler(sigterm_handler)" in inspect.getsource(worker.init)


def test_rays_public_list_of_actors_still_needs_the_dashboard() -> None:
    from ray._private.state import actors
    from ray.util.state import StateApiClient

    assert "actor_state_name" in inspect.signature(actors).parameters
    assert "dashboard" in inspect.getsource(StateApiClient)


def test_ray_still_has_no_public_name_for_its_directory() -> None:
    import ray

    assert 'kwargs.pop("_temp_dir", None)' in source_of("ray._private.worker")
    assert "temp_dir" not in inspect.signature(ray.init).parameters


def test_verl_still_puts_agent_loop_workers_on_all_nodes() -> None:
    text = source_of("verl.experimental.agent_loop.agent_loop")
    method = text[text.index("def _init_agent_loop_workers(") :].partition("\n    @auto_await")[0]
    assert "ray.nodes()" in method and "self.agent_loop_workers_class.options(" in method and "resources=" not in method


# --- the engine


def test_verls_client_still_tells_no_attempts_and_aborts_none() -> None:
    text = source_of("verl.workers.rollout.llm_server")
    client = text[text.index("class LLMServerClient") : text.index("class FullyAsyncLLMServerClient")]
    assert "def abort" not in client and "server_id, server = await self._acquire_server(" in client
    assert "return uuid4().hex" in client  # the server's id of a request is not known outside


# --- process groups


def test_verl_still_gives_its_process_groups_no_time() -> None:
    assert "initialize_global_process_group_ray(timeout_second=None)" in source_of("verl.workers.engine_workers")
    groups = source_of("torch.distributed.distributed_c10d")
    default = groups[groups.index("def _get_default_timeout(") :].partition("\ndef ")[0]
    assert "return default_pg_timeout" in default and "return default_pg_nccl_timeout" in default
    assert groups.count("timeout = _get_default_timeout(") >= 3  # a default group, a part of one, and a new one


# --- a CPU


def test_verl_still_asks_torch_for_a_backend_that_names_a_device_twice() -> None:
    import torch.distributed.distributed_c10d as c10d

    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source_of("verl.utils.distributed")
    with pytest.raises(ValueError):
        c10d.BackendConfig(c10d.Backend("cpu:gloo,cpu:gloo"))


def test_verls_engine_still_is_for_accelerators_only() -> None:
    text = source_of("verl.workers.engine.fsdp.transformer_impl")
    assert 'backend=["fsdp", "fsdp2"], device=["cuda", "npu"]' in text


def test_verl_still_names_the_socket_of_the_weight_sync_by_rays_job() -> None:
    text = source_of("verl.workers.rollout.vllm_rollout.vllm_rollout")
    assert 'f"ipc:///tmp/rl-colocate-zmq-{job_id}-' in text


@needs_vllm_cpu
def test_verl_still_loads_weights_bucket_by_bucket_and_vllm_still_repacks_them() -> None:
    assert "on_bucket_received" in source_of("verl.workers.rollout.vllm_rollout.utils")
    assert "layer.cpu_linear = " in source_of("vllm.model_executor.layers.utils")


@needs_vllm_cpu
def test_vllm_still_packs_experts_only_when_it_makes_their_kernel() -> None:
    text = source_of("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    setup = text[text.index("def _setup_kernel(") :].partition("\n    def ")[0]
    assert setup.index("if not is_weight_update:") < setup.index("fused_experts.process_weights_after_loading(layer)")


@needs_vllm_cpu
def test_vllms_kernel_still_takes_the_numbers_of_all_experts_for_places_in_its_own() -> None:
    """It is given the map of experts that tells this worker's places, and does not look at it."""
    text = source_of("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    kernel = text[text.index("class CPUUnquantizedExperts(") :].partition("\nclass ")[0]
    assert kernel.count("expert_map") == 1 and "expert_map: torch.Tensor | None,\n" in kernel


@needs_vllm_cpu
def test_vllm_still_starts_its_engine_as_a_python_of_its_own_on_a_cpu() -> None:
    assert 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in source_of("vllm.platforms.cpu")
    engines = source_of("vllm.v1.engine.utils")
    assert "import get_mp_context" in engines and "context = get_mp_context()" in engines


def test_verls_server_still_asks_for_batch_invariant_kernels_on_a_cpu() -> None:
    assert 'os.environ["VLLM_BATCH_INVARIANT"] = "1"' in source_of(
        "verl.workers.rollout.vllm_rollout.vllm_async_server"
    )


@needs_vllm_cpu
def test_vllm_still_looks_at_a_models_class_in_a_python_of_its_own() -> None:
    text = source_of("vllm.model_executor.models.registry")
    assert "mi = _run_in_subprocess(\n" in text and "subprocess.run(\n            _SUBPROCESS_COMMAND" in text


# --- the proxy


def test_verls_builders_still_encode_what_stands_before_a_turn_again() -> None:
    text = source_of("verl.utils.tokenizer.continuous_token")
    delta = text[text.index("def render_delta_token_id(") :].partition("\n    def ")[0]
    assert delta.count("self._render_tokens(") == 2 and "prefix_messages + appended_messages" in delta


def test_vllms_parser_still_makes_the_pieces_of_a_stream_for_a_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.parser.engine.parser_engine", reason="this vLLM has no parser engine")
    from vllm.parser.engine.parser_engine import ParserEngine

    if "_stream_arg_deltas" not in inspect.getsource(ParserEngine):
        pytest.skip("this vLLM has no switch for it")
    made: list[str] = []
    piece = ParserEngine._safe_arg_prefix
    counted = staticmethod(lambda text, *more: made.append(text) or piece(text, *more))
    monkeypatch.setattr(ParserEngine, "_safe_arg_prefix", counted)
    for parser, pieces in ((test_parsers.streamed, True), (test_parsers.parser, False)):
        made.clear()
        read = parser("qwen3_coder").parse(test_parsers.qwen([test_parsers.EDIT]), test_parsers.TOOLS)
        assert read.blocks == [test_parsers.use(test_parsers.EDIT)] and bool(made) == pieces
