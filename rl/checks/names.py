"""Checks of names that verl looks up: estimators, losses, corrections, trainers and engines.

verl finds a wrong one in a worker; in the case of a loss, after the first rollout. What verl knows is read from its
source, because importing it takes ten seconds.
"""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rl.config.compose import package_dir, refuse

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
# Key: the folder of verl in which its names are registered, and the places there that have them.
_KNOWN = {
    "algorithm.adv_estimator": ("trainer/ppo", r"@register_adv_est\(([^()]*)\)"),
    f"{_ACTOR}.policy_loss.loss_mode": ("trainer/ppo", r"@register_policy_loss\(([^()]*)\)"),
    f"{_ACTOR}.loss_agg_mode": ("workers/config", r"valid_loss_agg_modes = \[([^\]]*)\]"),
    f"{_ACTOR}.kl_loss_type": ("trainer/ppo", r"if kl_penalty (?:in|==) ([^:]*):"),
    f"{_CORRECTION}.rollout_is": ("trainer/ppo", r"valid_is_levels = \{([^}]*)\}"),
    f"{_CORRECTION}.rollout_rs": ("trainer/ppo", r"SUPPORTED_ROLLOUT_RS_OPTIONS: set\[str\] = \{([^}]*)\}"),
    "trainer.v1.trainer_mode": ("trainer/ppo/v1", r"@register_trainer\(([^()]*)\)"),
    "actor_rollout_ref.rollout.name": ("workers/rollout", r"RolloutReplicaRegistry\.register\(([^(),]*),"),
    f"{_ACTOR}.strategy": ("workers/engine", r"@EngineRegistry\.register\([^()]*backend=(\[[^\]]*\]|\"\w+\")"),
}


def check_names(config: DictConfig) -> None:
    """Raise ConfigError with a line for each name that verl would not find. With a module of the user's own that may
    register more of them (``actor_rollout_ref.model.external_lib``) none is checked."""
    if OmegaConf.select(config, "actor_rollout_ref.model.external_lib"):
        return
    lines = []
    for key, place in _KNOWN.items():
        value, known = OmegaConf.select(config, key), names(*place)
        # rollout_rs may be several; a plus behind a kl_loss_type changes its gradient
        for name in [] if value is None else [one.strip() for one in str(value).split(",")]:
            if name.removesuffix("+") in known:
                continue
            near = difflib.get_close_matches(str(name), known, n=1)
            others = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(sorted(known))}"
            lines.append(f"{key}: verl knows no {name!r}; {others}")
    refuse(lines)


@functools.cache
def names(folder: str, pattern: str) -> frozenset[str]:
    """Return the texts, and the values of enumerations' members, in what ``pattern`` finds in a folder of verl."""
    text = "\n".join(file.read_text() for file in sorted((Path(package_dir("verl")) / folder).rglob("*.py")))
    found = " ".join(re.findall(pattern, text))
    members = dict(re.findall(r"^    ([A-Z]\w*) = \"([\w-]+)\"$", text, re.M))
    return frozenset(re.findall(r"\"([\w-]+)\"", found)) | {
        members[name] for name in re.findall(r"\.([A-Z]\w*)", found) if name in members
    }
