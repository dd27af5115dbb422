"""Agent loop of the toy run: sample one reply, reward the share of low token ids in it.

Sessions of even tasks give two rows, so that the run also covers episodes of several rows.
"""

import uuid

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from rl.metrics import EpisodeLog


class ToyAgentLoop(AgentLoopBase):
    """See the module's docstring."""

    async def run(self, sampling_params, **kwargs):
        prompt = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, return_dict=False
        )
        outputs = []
        limited = dict(sampling_params, max_tokens=64)
        for _ in range(2 if kwargs["extra_info"]["index"] % 2 == 0 else 1):
            sampled = await self.server_manager.generate(
                request_id=uuid.uuid4().hex, prompt_ids=prompt, sampling_params=dict(limited)
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=sampled.token_ids,
                    response_mask=[1] * len(sampled.token_ids),
                    response_logprobs=sampled.log_probs,
                    num_turns=2,
                    metrics={},
                    extra_fields=sampled.extra_fields,
                )
            )
        ids = outputs[-1].response_ids
        outputs[-1].reward_score = sum(i < 256 for i in ids) / len(ids)
        outputs[-1].extra_fields["reward_extra_info"] = {}
        tokens = sum(len(o.response_ids) for o in outputs)
        EpisodeLog(self.config.run.dir).append(
            dict(
                step=int(kwargs["global_steps"]),
                split=kwargs["extra_info"]["split"],
                episode=uuid.uuid4().hex,
                task=str(kwargs["extra_info"]["index"]),
                reward=outputs[-1].reward_score,
                resolved=outputs[-1].reward_score > 0.5,
                failure=None,
                infra=False,
                rows=len(outputs),
                tokens_sampled=tokens,
                tokens_context=len(prompt) * len(outputs),
                turns=1,
                wall_s=0.0,
                boot_s=0.0,
                agent_s=0.0,
                grade_s=0.0,
                proxy_overhead_ms=0.0,
            )
        )
        return outputs
