from tests.integration.vllm_kit import vllm

__all__ = ["vllm"]
