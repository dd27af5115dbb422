"""On-policy distillation (``+distill=on_policy``): let a teacher score all rows of an episode.

verl asks its teacher for the log-probabilities of an episode's last row only. An episode with sub-agents or a
compaction has several rows, and a batch in which some rows lack that column cannot be trained on.
"""

from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
else:
    AgentLoopWorker = object


class ScoringWorker(AgentLoopWorker):
    """This mix-in goes before verl's agent loop worker: the teacher scores each row."""

    async def _agent_loop_postprocess(  # ty: ignore[incompatible-method-override]  as AgentLoopWorkerTQ
        self, output: "AgentLoopOutput | list[AgentLoopOutput]", validate: bool, **kwargs: Any
    ) -> None:
        for row in output[:-1] if isinstance(output, list) else ():
            await self._compute_teacher_logprobs(row, row.prompt_ids, row.response_ids, validate, kwargs)
        await super()._agent_loop_postprocess(output, validate, **kwargs)


def scored() -> type:
    """Return verl's agent loop worker with ``ScoringWorker``, as an ordinary class; verl has it only as a Ray actor."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ as Actor

    base = cast(Any, Actor).__ray_metadata__.modified_class.__ray_actor_class__
    return type("ScoredAgentLoopWorker", (ScoringWorker, base), {})


def worker_class(config: DictConfig) -> Any | None:
    """Return the Ray actor class that plays episodes and has a teacher score all their rows; None without a teacher."""
    if not config.distillation.enabled:
        return None
    import ray

    return ray.remote(scored())
