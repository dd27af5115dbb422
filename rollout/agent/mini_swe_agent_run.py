"""This program runs in a box, by the Python that mini-swe-agent is installed in: it works on the task of the standard
input, and prints each message of the conversation as a line of JSON.
"""

import json
import os
import sys

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def _say(message: dict) -> None:
    print("\n" + json.dumps({"added": message}), flush=True)


class Printing(DefaultAgent):
    """This agent prints what it adds to its messages."""

    def add_messages(self, *messages: dict) -> list[dict]:
        """Add messages, and print them."""
        for message in messages:
            extra = message.get("extra", {})
            response = extra.get("response")
            if isinstance(response, dict):  # of a reply that is taken, or dropped because it makes no proper call
                _say({"role": "assistant", "id": response["id"]} | response["choices"][0]["message"])
            if message["role"] != "assistant":
                known = {key: message.get(key) for key in ("role", "content", "tool_call_id")}
                _say(known | {key: extra.get(key) for key in ("exit_status", "returncode")})
        return super().add_messages(*messages)


def main() -> None:
    """Work on the task."""
    task = sys.stdin.read()
    told = {name: os.environ.pop(name) for name in ("MODEL", "MAX_TOKENS", "MAX_TURNS")}
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    limits = {"step_limit": int(told["MAX_TURNS"]), "cost_limit": 0}
    kept = ("system_template", "instance_template")
    # Commands of the policy get neither the session's secret nor its address.
    secret = {"api_key": os.environ.pop("OPENAI_API_KEY"), "api_base": os.environ.pop("OPENAI_API_BASE")}
    asked = {"max_tokens": int(told["MAX_TOKENS"]), "drop_params": True, **secret}
    model = LitellmModel(
        **config["model"] | {"model_kwargs": asked},
        model_name=f"openai/{told['MODEL']}",
        cost_tracking="ignore_errors",
    )
    environment = LocalEnvironment(**config["environment"])
    Printing(model, environment, **{key: config["agent"][key] for key in kept}, **limits).run(task)


main()
