"""This program runs in a box, by the Python that mini-swe-agent is installed in: it works on the task of the standard
input, and prints each message of the conversation as a line of JSON.
"""

import json
import os
import sys
from typing import Any

import requests
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL


def _say(message: dict) -> None:
    print("\n" + json.dumps({"added": message}), flush=True)


class Refused(Exception):
    """This error is an answer that no other try would change."""


class Model(OpenRouterModel):
    """This model is OpenRouter's with another address, and waits for a reply as long as it takes.

    Its requests and how replies are read are those of the default, LiteLLM's, which takes six seconds to import.
    """

    def __init__(self, url: str, secret: str, **config: Any) -> None:
        super().__init__(**config)
        self._api_url, self._api_key = url, secret
        self.abort_exceptions = [Refused, KeyboardInterrupt]

    def _query(self, messages: list[dict], **kwargs: Any) -> dict:
        asked = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL]}
        headers = {"Authorization": f"Bearer {self._api_key}"}
        answer = requests.post(self._api_url, headers=headers, json=asked | self.config.model_kwargs)
        if answer.status_code in (400, 401, 403, 404, 410, 413):
            raise Refused(f"HTTP {answer.status_code}: {answer.text}")
        answer.raise_for_status()
        return answer.json()


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
    secret, url = os.environ.pop("OPENAI_API_KEY"), os.environ.pop("OPENAI_API_BASE")
    asked = {"model_name": told["MODEL"], "model_kwargs": {"max_tokens": int(told["MAX_TOKENS"])}}
    model = Model(f"{url}/chat/completions", secret, **config["model"] | asked, cost_tracking="ignore_errors")
    environment = LocalEnvironment(**config["environment"])
    Printing(model, environment, **{key: config["agent"][key] for key in kept}, **limits).run(task)


main()
