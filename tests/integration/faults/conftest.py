from tests.integration.train_kit import warm_start

__all__ = ["warm_start"]
