"""How fast is the proxy? Requests of the shape that Claude Code sends, a null engine, the peers in the same run.

    python scripts/bench_proxy.py --model DIR [--peers] [--out FILE]

``DIR`` has a tokenizer and chat template with Qwen3-Coder's tool calls (``python -m rl.quickstart.policy --out DIR``).
The proxy under test is the stand-alone server with its real tokenizer, renderer and parser; only its engine is null (a
tool call of fixed ids, at once). It has a core of its own, the client (another process) has the others. ``--peers``
puts beside it, with replies that are not streamed: agentlightning's LLMProxy before a null chat-completions server,
and a real vLLM server on the CPU (random weights, one token per reply) asked through its own /v1/messages, and
through this proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from proxy_load import Load, Talk, play

from rl.run.programs import free_port
from rl.run.vllm_server import answers, vllm_server

SAID = "<tool_call>\n<function=Tool1>\n<parameter=path>\n/src/module.py\n</parameter>\n</function>\n</tool_call>"


# ------------------------------------------------------------------ roles: each is a process of its own


def _policy(model: str) -> Any:
    from rollout.proxy.engine import Completion
    from rollout.proxy.standalone import Options, load_policy

    make = load_policy(Options("", model, "qwen3_coder", any_family=True))

    class Null:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            return Completion(list(ids), [-0.5] * len(ids))

    policy = make(Null(), 4_000_000)
    ids = [*policy.tokenizer.encode(SAID, add_special_tokens=False), *policy.end_ids]
    return policy


async def serve(model: str) -> None:
    """This proxy, a null engine behind it."""
    from rollout.proxy.standalone import Options, StandAlone

    server = StandAlone(Options("http://127.0.0.1:9", model, "qwen3_coder", max_sessions=1000))
    server.policy = _policy(model)
    gc.collect()
    gc.freeze()  # as StandAlone.load does
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


async def null_backend() -> None:
    """A chat-completions server that says the same at once."""
    from aiohttp import web

    function = {"name": "Tool1", "arguments": '{"path": "/src/module.py"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    choice = {"index": 0, "finish_reason": "tool_calls"}
    choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    reply = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    out = json.dumps({**reply, "usage": usage}).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=out, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def lightning(backend: int) -> None:
    """agentlightning's LLMProxy in one process, default middlewares and callbacks, a store in memory."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # on loopback only
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.memory import InMemoryLightningStore

    params = {"model": "hosted_vllm/policy", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "x"}
    store = InMemoryLightningStore(thread_safe=True)
    rollout = await store.start_rollout(input={})  # what it records a call under, taken from the path
    proxy = LLMProxy(
        host="127.0.0.1",
        port=(port := free_port()),
        model_list=[{"model_name": "policy", "litellm_params": params}],
        store=store,
        launch_mode="thread",
    )
    await proxy.start()
    print(port, f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}", flush=True)
    await asyncio.Event().wait()


async def stages(model: str, turns: int) -> None:
    """One episode of ``turns`` without HTTP: milliseconds by stage and turn, as JSON."""
    from rollout.proxy import session as module
    from rollout.proxy.messages import decode_request
    from rollout.proxy.replies import reply_events
    from rollout.proxy.session import Session
    from rollout.proxy.tree import Tree

    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + 1e3 * (time.perf_counter() - began)

        return run

    setattr(module, "conversation", timed("read", module.conversation))  # noqa: B010
    setattr(Tree, "match", timed("match", Tree.match))  # noqa: B010
    setattr(Session, "_encode", timed("encode", Session._encode))  # noqa: B010
    setattr(Session, "_keep", timed("keep", Session._keep))  # noqa: B010
    decode, events = timed("decode", decode_request), timed("reply", reply_events)
    session, talk, rows = Session("e", _policy(model)), Talk(1, 9_000), []
    for _ in range(turns):
        spent.clear()
        body = talk.body()
        began = time.perf_counter()
        turn = session.prepare(decode(body), retry=False)
        node = await turn.reply()
        out = events(node.reply)
        total = 1e3 * (time.perf_counter() - began)
        node.delivered = True
        talk.heard(out)
        rows.append({**spent, "total": total, "bytes": len(body), "context": turn.context.length})
    tree = session.tree
    final = max(node.length for node in tree.nodes)
    print(json.dumps({"rows": rows, "encoded": tree.encoded_tokens(), "final": final}), flush=True)


# ------------------------------------------------------------------ the run


@dataclass
class Table:
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, target: str = "", met: bool | None = None) -> None:
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        self.rows.append((what, f"{value:.3g} {unit}", target, verdict))
        print(f"{what:64} {value:10.3g} {unit:10} {target:16} {verdict}", flush=True)

    def markdown(self) -> str:
        head = "| what | measured | target | |\n| --- | --- | --- | --- |\n"
        return head + "".join(f"| {' | '.join(row)} |\n" for row in self.rows)


@contextlib.contextmanager
def role(*argv: str, cores: set[int]) -> Generator[tuple[subprocess.Popen[str], int, str]]:
    """One of the roles above as a process on ``cores``: process, port, and what comes before a path."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
    process = subprocess.Popen(
        [sys.executable, __file__, *argv], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    try:
        os.sched_setaffinity(process.pid, cores)
        assert process.stdout is not None
        line = next((words for line in process.stdout if (words := line.split()) and words[0].isdigit()), None)
        if line is None:
            log.seek(0)
            raise RuntimeError(f"{argv[0]} ended with status {process.wait()}:\n{log.read()[-3000:]}")
        yield process, int(line[0]), "".join(line[1:])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@contextlib.contextmanager
def vllm(model: str) -> Generator[int]:
    """A vLLM server with random weights of ``model``'s shape and room for these prompts."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(model, directory, dirs_exist_ok=True)
        config = Path(directory) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 200_000}))
        argv = ["--max-model-len", "200000", "--dtype", "float32", "--enforce-eager", "--load-format", "dummy"]
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--uvicorn-log-level", "warning"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        with vllm_server(directory, Path(directory) / "server.log", *argv, environment=env, timeout_s=300) as server:
            yield int(server.url.rpartition(":")[2])


def shoot(load: Load, cores: set[int]) -> dict[str, Any]:
    argv = [sys.executable, __file__, "load", json.dumps(asdict(load))]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, cores)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with status {process.returncode}")
    return json.loads(out)


def median(load: Load, cores: set[int], runs: int = 3) -> dict[str, Any]:
    """The run in the middle: neighbours on the same host make single ones worth little."""
    # What an engine has in its prefix cache from another run would cost it nothing.
    seeds = [random.randrange(1 << 30) for _ in range(runs)]
    found = [shoot(replace(load, tag=f"{load.tag}{seed}-", seed=seed), cores) for seed in seeds]
    return sorted(found, key=lambda result: result["wall"])[runs // 2]


def rate(result: dict[str, Any]) -> tuple[float, float]:
    """Turns a second, mean milliseconds."""
    took = [1e3 * t for session in result["later"] for t in session]
    return len(took) / result["wall"], statistics.mean(took)


def own(table: Table, model: str, mine: set[int], others: set[int]) -> None:
    with role("serve", model, cores=mine) as (process, port, _):
        rss = psutil.Process(process.pid).memory_info().rss
        table.add("resident, vLLM's parser and verl's renderer loaded", rss / 2**20, "MiB")
        # 500 turns a second of 32 sessions leave 64 ms for each: 20 for the proxy, the rest for what an engine does.
        result = median(Load(port, 32, 60, 300, think_s=0.044, tag="t"), others)
        turns, mean = rate(result)
        low, high = (size / 1e3 for size in result["bytes"])
        title = f"32 sessions, bodies {low:.0f}-{high:.0f} KB, 44 ms between turns: on one core"
        table.add(title, turns, "turns/s", ">= 500", turns >= 500)
        table.add("  mean latency", mean, "ms", "< 20", mean < 20)
        result = median(Load(port, 32, 60, 300, tag="a"), others)
        turns, _ = rate(result)
        table.add("32 sessions, nothing between turns", turns, "turns/s")
        table.add("  the client was busy", 100 * result["client_busy"], "% of a core")
        result = median(Load(port, 1, 100, 60, tag="b"), others)
        took = sorted(1e3 * t for t in result["later"][0])
        p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
        table.add("1 session: p50", p50, "ms", "< 3", p50 < 3)
        table.add("1 session: p99", p99, "ms", "< 15", p99 < 15)
        table.add("first turn: 88 KB encoded", 1e3 * statistics.mean(result["first"]), "ms")
        result = median(Load(port, 1, 100, 9_000, tag="c"), others)
        took = [1e3 * t for t in result["later"][0]]
        second, last = statistics.median(took[:5]), statistics.median(took[-5:])
        table.add(f"over HTTP: turn 100 ({result['bytes'][1] / 1e6:.2f} MB)", last, "ms")
        table.add("  turn 100 / turn 2", last / second, "x", "<= 3", last / second <= 3)


def by_stage(table: Table, model: str) -> None:
    out = subprocess.run([sys.executable, __file__, "stages", model], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(out.stdout.splitlines()[-1])
    for number in (1, 2, 20, 50, 100):
        row = found["rows"][number - 1]
        parts = "  ".join(f"{name} {ms:.2f}" for name, ms in row.items() if name not in ("bytes", "context"))
        print(f"  turn {number:3}: {row['bytes'] / 1e3:7.0f} KB {row['context']:7} tokens, ms: {parts}", flush=True)
    second, last = (statistics.median(r["total"] for r in rows) for rows in (found["rows"][1:6], found["rows"][-5:]))
    table.add("without HTTP: turn 100 / turn 2", last / second, "x", "<= 3", last / second <= 3)
    ratio = found["encoded"] / found["final"]
    table.add("tokens encoded / final length", ratio, "x", "<= 1.05", ratio <= 1.05)


def start_up(table: Table, model: str) -> None:
    argv = [sys.executable, "-m", "rollout.proxy", "--engine", "http://127.0.0.1:9", "--model", model, "--port", "0"]
    began = time.perf_counter()
    process = subprocess.Popen([*argv, "--tool-parser", "qwen3_coder"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        took = time.perf_counter() - began
        rss = psutil.Process(process.pid).memory_info().rss / 2**20
    finally:
        process.kill()
        process.wait()
    table.add("start to open port", took, "s", "< 2", took < 2)
    table.add("  resident then (nothing of verl or vLLM)", rss, "MiB", "< 200", rss < 200)


def peers(table: Table, model: str, mine: set[int], others: set[int]) -> None:
    shape = Load(0, sessions=8, turns=15, result_chars=300, stream=False)
    with role("serve", model, cores=mine) as (_, port, _):
        ours, _ = rate(median(replace(shape, port=port), others))
        _, alone = rate(shoot(replace(shape, port=port, sessions=1, tag="x"), others))
    table.add("peers: this proxy, 8 sessions", ours, "turns/s")
    table.add("  1 session", alone, "ms")
    with (
        role("null-backend", cores=others) as (_, backend, _),
        role("lightning", str(backend), cores=mine) as (_, port, prefix),
    ):
        theirs, _ = rate(median(replace(shape, port=port, prefix=prefix), others))
        _, alone = rate(shoot(replace(shape, port=port, prefix=prefix, sessions=1), others))
    table.add("peers: agentlightning's LLMProxy, 8 sessions", theirs, "turns/s")
    table.add("  1 session", alone, "ms")
    table.add("  this proxy / LLMProxy", ours / theirs, "x", ">= 20", ours / theirs >= 20)
    argv = ["--model", model, "--tool-parser", "qwen3_coder"]
    with vllm(model) as server, stand_alone(["--engine", f"http://127.0.0.1:{server}", *argv]) as port:
        took: dict[int, list[float]] = {server: [], port: []}
        for _ in range(8):  # in turn: what else the machine does meets both
            for at in took:
                seed = random.randrange(1 << 30)  # what is in the engine's prefix cache costs it nothing
                load = Load(at, 1, 15, 60, stream=False, max_tokens=1, tag=f"{seed}", seed=seed)
                took[at] += [1e3 * t for t in shoot(load, others | mine)["later"][0]]
    theirs, ours = (statistics.median(took[at]) for at in (server, port))
    table.add("peers: vLLM's own /v1/messages, 1 session: p50, engine included", theirs, "ms")
    table.add("  this proxy before the same server", ours, "ms")
    table.add("  vLLM's own / this proxy", theirs / ours, "x", "> 1", ours < theirs)


@contextlib.contextmanager
def stand_alone(argv: list[str]) -> Generator[int]:
    command = [sys.executable, "-m", "rollout.proxy", *argv, "--port", str(port := free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 180
        while not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the proxy did not come up")
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    roles: dict[str, Callable[..., Any]] = {
        "serve": lambda model: uvloop.run(serve(model)),
        "null-backend": lambda: uvloop.run(null_backend()),
        "lightning": lambda backend: asyncio.run(lightning(int(backend))),
        "stages": lambda model: asyncio.run(stages(model, 100)),
        "load": lambda load: print(json.dumps(uvloop.run(play(Load(**json.loads(load)))))),
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        return roles[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table there, as Markdown")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    mine, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    machine = f"{time.strftime('%Y-%m-%d')}, {len(cores)} cores, {platform.processor() or platform.machine()}"
    print(f"{machine}, Python {platform.python_version()}")
    table = Table()
    start_up(table, args.model)
    by_stage(table, args.model)
    own(table, args.model, mine, others)
    if args.peers:
        peers(table, args.model, mine, others)
    if args.out:
        args.out.write_text(f"{machine}\n\n{table.markdown()}")


if __name__ == "__main__":
    main()
