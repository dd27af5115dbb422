"""Weights are sent to engines with devices of their own, here without verl's workers around them."""

import asyncio
from pathlib import Path

import pytest
import torch

WEIGHTS = {
    "embed": torch.arange(1000, dtype=torch.float32).reshape(100, 10),  # larger than a message
    "norm": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    "head": torch.randn(7, 5).T.contiguous(),
}


@pytest.mark.parametrize("engines", [1, 2])
def test_each_engine_gets_all_weights_each_time(engines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    from rl.cpu.checkpoint_engine import ZmqCheckpointEngine

    assert CheckpointEngineRegistry.get("zmq") is ZmqCheckpointEngine
    monkeypatch.setenv("RL_SOCKET_DIR", str(tmp_path))
    trainer = [ZmqCheckpointEngine(1024, is_master=True), ZmqCheckpointEngine(1024)]
    rollout = [ZmqCheckpointEngine(1024) for _ in range(engines)]

    async def received(engine: ZmqCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: weight async for name, weight in engine.receive_weights()}

    async def sync(scale: int) -> None:
        both = trainer + rollout
        addresses = [one.prepare() for one in both]
        of_trainer, of_rollout = ZmqCheckpointEngine.build_topology(2, engines, addresses)
        for ones, arguments in ((trainer, of_trainer), (rollout, of_rollout)):
            for i, one in enumerate(ones):
                one.init_process_group(**{name: values[i] for name, values in arguments.items()})
        sent = {name: weight * scale for name, weight in WEIGHTS.items()}
        sends = [one.send_weights(iter(sent.items())) for one in trainer]
        got = await asyncio.gather(*(received(one) for one in rollout), *sends)
        for one in both:
            one.finalize()
        for weights in got[:engines]:
            assert list(weights) == list(sent)
            for name, weight in weights.items():
                assert weight.dtype == sent[name].dtype and torch.equal(weight, sent[name])

    for scale in (1, 2):  # as after each step
        asyncio.run(sync(scale))
    assert not list(tmp_path.iterdir())
