from tests.integration.train_kit import warm_start
from tests.integration.vllm_kit import vllm

__all__ = ["vllm", "warm_start"]
