"""Play the same scenes of the same agents through this project's proxy and through what others publish, and compare
what each would train on with what the engine sampled.

    sh scripts/exactness/setup.sh
    python scripts/exactness/bench.py --model DIR [--systems NAME ...] [--agents NAME ...] [--scenes NAME ...]

DIR has the tokenizer, chat template and config of a Qwen3 model; weights are not needed. Printed are an object for each
episode and a table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scenes import SCENES, plays

from rl.run.programs import free_port, last_lines
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.agent.mini_swe_agent import MiniSweAgent
from rollout.sandbox.docker.engine import cache_dir

HERE = Path(__file__).parent
LIMITS: dict[str, Any] = {"timeout_s": 300.0, "max_tokens": 2000, "max_context": 45_000, "max_turns": 20}
AGENTS = {
    "claude_code": lambda: ClaudeCode(find_binary(None), **LIMITS),
    "mini_swe_agent": lambda: MiniSweAgent.of(**LIMITS),
}
_OWN, _OTHERS = sys.executable, cache_dir("exactness")
# Of each system: its gateway's Python and program, and why it cannot serve some agents.
SYSTEMS: dict[str, tuple[str | Path, str, dict[str, str]]] = {
    "this project": (_OWN, "gateway_ours.py", {}),
    "verifiers 0.4.0": (
        _OTHERS / "verifiers/bin/python",
        "gateway_verifiers.py",
        {"claude_code": "its client for training refuses Messages"},
    ),
    "agentlightning 1.0.2": (_OWN, "gateway_lightning1.py", {"claude_code": "it has no Messages API"}),
    "agentlightning 0.3.0": (_OTHERS / "lightning0/bin/python", "gateway_lightning0.py", {}),
}
_SET = {
    "PYTHONPATH": str(HERE.parents[1]),
    "VLLM_NO_USAGE_STATS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on loopback only
}
_COLUMNS = ("once", "resampled", "lost", "altered", "twice", "unread", "made up", "logprobs")
Rows = list[tuple[list[int], list[int], list[float]]]


class Cable:
    """A TCP relay between agent and gateway: it takes the times of calls, and can cut the reply to one of them off."""

    def __init__(self, port: int, cut: int) -> None:
        self.port, self.cut, self.asked, self.took = port, cut, 0, list[float]()

    async def __call__(self, agent: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Relay a connection. Hardly more is taken from the gateway than is sent on: it knows what was not read."""
        loop, sent, began = asyncio.get_running_loop(), 0.0, 0.0
        with socket.create_connection(("127.0.0.1", self.port)) as gateway:
            gateway.setblocking(False)

            async def up() -> None:
                nonlocal began
                while data := await agent.read(1 << 16):
                    if sent >= began:
                        self.asked += data.startswith(b"POST") and b"count_tokens" not in data[:200]
                    began = time.perf_counter()
                    await loop.sock_sendall(gateway, data)
                gateway.shutdown(socket.SHUT_WR)

            async def down() -> None:
                nonlocal sent
                while data := await loop.sock_recv(gateway, 512):
                    if sent < began:
                        self.took.append(0.0)
                    sent = time.perf_counter()
                    self.took[-1] = sent - began
                    if self.asked == self.cut:
                        self.cut = 0
                        raise ConnectionAbortedError
                    back.write(data)
                    await back.drain()
                back.close()

            both = asyncio.gather(up(), down())
            try:
                await both
            except OSError:
                both.cancel()
                back.transport.abort()


async def _program(python: str | Path, log: Path, *argv: str) -> asyncio.subprocess.Process:
    """Start a program of this folder."""
    return await _start(log, python, HERE / argv[0], *argv[1:], env={**os.environ, **_SET})


async def _start(log: Path, *argv: Any, **more: Any) -> asyncio.subprocess.Process:
    with log.open("ab") as said:
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": said}
        return await asyncio.create_subprocess_exec(*argv, limit=1 << 30, **pipes, **more)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


async def _ask(gateway: Any, log: Path, line: str = "") -> Any:
    gateway.stdin.write(line.encode())
    while answer := await gateway.stdout.readline():
        if answer.startswith(b"@"):
            return json.loads(answer[1:])
    raise RuntimeError(f"{log}: {last_lines(log.read_text(), 5)}")


async def _act(name: str, prompt: str, url: str, key: str, place: Path) -> None:
    """Run an agent's process to its end, in a directory of its own. Raises TimeoutError: no figure comes of a part."""
    agent, home, work = AGENTS[name](), place / "home", place / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    argv = agent.argv(str(home))[name != "claude_code" :]  # without the forwarder
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", **agent.environment(key, base_url=url)}
    process = await _start(place / "said", *argv, cwd=work, env=env, start_new_session=True)
    try:
        await asyncio.wait_for(process.communicate(agent.stdin(prompt)), agent.timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def compare(sampled: Rows, rows: Rows) -> Counter[str]:
    """Count sampled tokens by what becomes of them in training rows.

    ``sampled``: prompt, reply and its log-probabilities, of each call. ``once``: in one row, after the same ids as they
    were sampled after. ``twice``: in more than one. ``altered``: in one after other ids. ``lost``: in none.
    ``resampled``: in none, as the agent asked again because the reply never arrived. ``unread``: in one all the same.
    ``made up``: trained on, and never sampled so. ``logprobs``: of those trained on once, those that have the engine's
    log-probability.
    """
    there = []
    for ids, mask, known in rows:
        edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
        there += [(ids, a, b, known[sum(mask[:a]) :][: b - a]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    counts, matched = Counter[str](sampled=sum(len(said) for _, said, _ in sampled), rows=len(rows)), set[int]()
    last = {tuple(asked): number for number, (asked, _, _) in enumerate(sampled)}
    for number, (asked, said, logprobs) in enumerate(sampled):
        found = [n for n, (ids, a, b, _) in enumerate(there) if ids[a:b] == said]
        exact = [n for n in found if there[n][0][: there[n][1]] == asked]
        again = last[tuple(asked)] > number
        missing = "resampled" if again else "lost"
        kind = "twice" if len(found) > 1 else "once" if exact else "altered" if found else missing
        matched |= {*found}
        counts[kind] += len(said)
        counts["unread"] += len(said) * (again and bool(found))
        if kind == "once":
            counts["logprobs"] += sum(abs(a - b) < 1e-4 for a, b in zip(there[exact[0]][3], logprobs, strict=False))
    counts["made up"] = sum(b - a for n, (_, a, b, _) in enumerate(there) if n not in matched)
    return counts


async def _episode(gateway: Any, logs: Path, agent: str, scene: str, place: Path) -> Counter[str]:
    """Play one episode; return its counts, with the median of its calls' times in milliseconds."""
    before = len((logs / "sampled").read_text().splitlines())
    told, key = await _ask(gateway, logs / "gateway", "open\n")
    port, _, path = told.removeprefix("http://127.0.0.1:").partition("/")
    cable, own = Cable(int(port), 2 * (scene == "cut")), free_port()
    async with await asyncio.start_server(cable, "127.0.0.1", own):
        prompt = f"MAIN SCENE {agent} {scene} e{before}: go on."
        await _act(agent, prompt, f"http://127.0.0.1:{own}/{path}".rstrip("/"), key, place)
    rows = await _ask(gateway, logs / "gateway", "rows\n")
    sampled = [json.loads(line) for line in (logs / "sampled").read_text().splitlines()[before:]]
    if not sampled:
        raise RuntimeError(f"{agent}, {scene}: nothing was sampled: {last_lines((place / 'said').read_text(), 3)}")
    more = {"calls": len(sampled), "ms": round(1000 * statistics.median(cable.took or [0]))}
    return compare(sampled, rows) + Counter(more)


async def play(given: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """Play all scenes; return an object for each, and print them."""
    results, url = list[dict[str, Any]](), f"http://127.0.0.1:{(port := free_port())}"
    engine = await _program(_OWN, logs / "engine", "engine.py", given.model, str(port), str(logs / "sampled"))
    try:
        await _ask(engine, logs / "engine")
        for system in given.systems:
            python, program, refused = SYSTEMS[system]
            gateway = await _program(python, logs / "gateway", program, url, given.model)
            try:
                await _ask(gateway, logs / "gateway")
                for agent, scene in ((a, s) for a in given.agents for s in given.scenes if plays(a, s)):
                    if agent not in refused:
                        counts = await _episode(gateway, logs, agent, scene, logs / str(len(results)))
                        results.append({"system": system, "agent": agent, "scene": scene, **counts})
                        print(json.dumps(results[-1]), flush=True)
            finally:
                await _end(gateway)
    finally:
        await _end(engine)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown, a line for each system and agent."""
    lines = [f"| system | agent | rows per episode | {' | '.join(_COLUMNS)} | ms per call |", f"|{' --- |' * 12}"]
    for system, agent in ((system, agent) for system in SYSTEMS for agent in AGENTS):
        mine = [one for one in results if (one["system"], one["agent"]) == (system, agent)]
        if not mine:
            continue
        sums = {name: sum(one.get(name, 0) for one in mine) for name in (*_COLUMNS, "rows", "sampled")}
        shares = " | ".join(f"{100 * sums[name] / sums['sampled']:.1f} %" for name in _COLUMNS)
        ms = statistics.median(one["ms"] for one in mine)
        lines.append(f"| {system} | {agent} | {sums['rows'] / len(mine):.2f} | {shares} | {ms:.0f} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True)
    for name, known in (("systems", SYSTEMS), ("agents", AGENTS), ("scenes", SCENES)):
        options.add_argument(f"--{name}", nargs="+", choices=known, default=[*known])
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="exactness-", ignore_cleanup_errors=True) as logs:
        print(table(asyncio.run(play(given, Path(logs)))))


if __name__ == "__main__":
    main()
