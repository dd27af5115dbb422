"""This program runs in a box, by the Python that OpenHands is installed in: it works on the task of the standard input,
and prints each reply, each result and the end as a line of JSON.
"""

import json
import logging
import os
import sys
from contextlib import suppress

from openhands.sdk import LLM, Agent, Conversation, Event
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.conversation.impl import local_conversation
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.event import AgentErrorEvent, ObservationEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import content_to_str
from openhands.sdk.llm import llm as calls
from openhands.tools.preset.default import get_default_tools, register_builtins_agents

_complete = calls.litellm_completion
_errors: list[ConversationErrorEvent] = []


def _say(**message: object) -> None:
    print("\n" + json.dumps({"added": message}), flush=True)


def _asked(**asked: object) -> object:
    """Ask for a reply, and print it as it was sent, whoever asked: agent, sub-agent or condenser."""
    reply = _complete(**asked)
    said = reply.choices[0].message.model_dump()
    _say(role="assistant", id=reply.id, content=said["content"], tool_calls=said["tool_calls"])
    return reply


def _hear(event: Event) -> None:
    if isinstance(event, (ObservationEvent, AgentErrorEvent)):
        failed = isinstance(event, AgentErrorEvent) or event.observation.is_error
        words = "".join(content_to_str(event.to_llm_message().content))
        _say(role="tool", tool_call_id=event.tool_call_id, content=words, returncode=int(failed))
    elif isinstance(event, ConversationErrorEvent):
        _errors.append(event)


def main() -> None:
    """Work on the task."""
    task = sys.stdin.read()
    logging.disable()
    told = {name: os.environ.pop(name) for name in ("MODEL", "MAX_TOKENS", "MAX_TURNS")}
    # Commands of the policy get neither the session's secret nor its address.
    way = {"api_key": os.environ.pop("OPENAI_API_KEY"), "base_url": os.environ.pop("OPENAI_API_BASE")}
    calls.litellm_completion = _asked
    # It has no setting that keeps it from plug-ins and sub-agents of the work tree.
    local_conversation.load_available_plugins = lambda **_: {}
    local_conversation.register_file_agents = lambda _: None
    register_builtins_agents(enable_browser=False)
    llm = LLM(
        model=f"openai/{told['MODEL']}",
        max_output_tokens=int(told["MAX_TOKENS"]),
        timeout=None,
        usage_id="agent",
        **way,
    )
    agent = Agent(
        llm=llm,
        tools=get_default_tools(enable_browser=False, enable_sub_agents=True),
        system_prompt_kwargs={"cli_mode": True},
        # Its own default sums up after 80 events, whatever they hold; this one when the context is full.
        condenser=LLMSummarizingCondenser(llm=llm.model_copy(update={"usage_id": "condenser"}), max_size=10**6),
    )
    conversation = Conversation(
        agent,
        workspace=os.getcwd(),
        callbacks=[_hear],
        visualizer=None,
        max_iteration_per_run=int(told["MAX_TURNS"]) or 10**6,
    )
    conversation.send_message(task)
    with suppress(ConversationRunError):
        conversation.run()
    status = conversation.state.execution_status.value
    words, code = get_agent_final_response(conversation.state.events), "Submitted" if status == "finished" else status
    if _errors:
        words, code = _errors[-1].detail, _errors[-1].code
    _say(role="exit", content=words or code, exit_status="LimitsExceeded" if code == "MaxIterationsReached" else code)
    conversation.close()


main()
