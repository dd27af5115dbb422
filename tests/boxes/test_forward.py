"""This module tests the forwarder in every kind of box: a program that knows only TCP reaches its session, and a reply
that it does not read is not delivered.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from rollout.agent import forward
from rollout.proxy.server import ProxyServer
from tests.boxes.kinds import BoxKit
from tests.kit import QueueEngine, char_policy

pytestmark = pytest.mark.asyncio

READING = """
while IFS= read -r -u 3 line && [ "${#line}" -gt 1 ]; do
    case "$line" in [Cc]ontent-[Ll]ength:*) size=${line//[!0-9]/} ;; esac
done
head -c "$size" <&3
exit 4
"""
ASKING = """
exec 3<>"/dev/tcp/127.0.0.1/$PORT"
printf 'POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nx-api-key: %s\\r\\n' "$SECRET" >&3
printf 'Content-Length: %d\\r\\n\\r\\n%s' "${#BODY}" "$BODY" >&3
until read -t 0 -u 3; do sleep 0.02; done
"""


async def test_a_program_that_knows_only_tcp_reaches_its_session(kind: BoxKit) -> None:
    server, program = ProxyServer(), forward.program()
    await server.start()
    with tempfile.TemporaryDirectory(prefix="cc-") as home:
        box = await kind.boot(binds={program: str(program)}, socket_dir=Path(home))
        try:
            policy = char_policy(QueueEngine("Unread.", "Read."))
            session = await server.open_session("e", policy, Path(home, "s"), box.relays)
            for text, rest in (("one", "exit 3"), ("two", READING)):
                body = json.dumps({"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}]})
                env = {forward.SOCKET: f"{home}/s", "PORT": forward.PORT, "SECRET": session.secret, "BODY": body}
                argv = [str(program), "bash", "-c", ASKING + rest]
                done = await box.exec(argv, env=env, timeout_s=60)
                assert done.returncode == int(rest.strip()[-1]), done
            assert b"Read." in done.stdout
            session.settle()
            said = {node.text: node.delivered for node in session.tree.nodes if node.sampled}
            # What has read from a relayed connection is not the program.
            assert said == {"Unread.": False, "Read.": not box.relays}
        finally:
            await box.close()
            await server.stop()
