"""Configs for tests, composed once per process: Hydra takes a second of CPU time for each, and a copy hardly any."""

import functools
import pickle
import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rl.config import compose


@functools.cache
def _composed(*overrides: str) -> bytes:
    return pickle.dumps(compose(overrides))


def composed(*overrides: str) -> DictConfig:
    """Return what ``rl.config.compose`` returns for these overrides. Those with a dotted key are set on a copy."""
    dotted = [text for text in overrides if re.match(r"\+?\w+\.", text)]
    config = pickle.loads(_composed(*(text for text in overrides if text not in dotted)))
    for override in OverridesParser.create().parse_overrides(dotted):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    return config
