"""A whole agent: it asks the model, runs the commands that it calls, and tells it what they printed."""

import http.client
import json
import os
import socket
import subprocess
import sys

BASH = {
    "name": "Bash",
    "description": "Run a shell command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


class Connection(http.client.HTTPConnection):
    """A connection to the proxy's socket, the only way out of the box."""

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["PROXY_SOCKET"])


def ask(messages):
    """Return the model's reply, or raise RuntimeError with the proxy's own words."""
    request = {"model": os.environ["MODEL"], "max_tokens": int(os.environ["MAX_TOKENS"]), "tools": [BASH]}
    connection = Connection("proxy")
    headers = {"authorization": f"Bearer {os.environ['PROXY_SECRET']}", "content-type": "application/json"}
    connection.request("POST", "/v1/messages", json.dumps({**request, "messages": messages}), headers)
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(said["error"]["message"])
    return said


def run(call):
    """Return the result of a call, as a block of the next message."""
    command = str(call["input"].get("command", ""))
    known = {name: value for name, value in os.environ.items() if not name.startswith("PROXY_")}
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=known
    )
    text = done.stdout.decode(errors="replace")[:10_000] or f"exit status {done.returncode}"
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text, "is_error": done.returncode != 0}


def main():
    """Work on the task of the standard input; return how it ended, and the last words."""
    messages = [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(int(os.environ["MAX_TURNS"])):
        try:
            reply = ask(messages)
        except RuntimeError as error:
            return "error", str(error)
        messages.append({"role": "assistant", "content": reply["content"]})
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        if not calls:
            return "finished", "".join(block.get("text", "") for block in reply["content"])
        messages.append({"role": "user", "content": [run(call) for call in calls]})
    return "max_turns", ""


if __name__ == "__main__":
    status, detail = main()
    print("\n" + json.dumps({"status": status, "detail": detail}))
