"""Measure how fast the proxy is, with requests of the shape that Claude Code sends.

    python scripts/bench_proxy.py --model DIR [--only PART]

``DIR`` has a tokenizer and a chat template with Qwen3-Coder's tool calls; ``python -m rl.quickstart.policy --out DIR``
makes one, whose template is made to write the schemas of tools, as those of real models do. The stand-alone proxy is
measured with its real tokenizer, renderer and parser. Only its engine is a null engine, which returns the ids of the
same tool call at once. The proxy has a core of its own; the client, another process, has the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from measuring import head, row
from proxy_load import SHAPES, Load, Talk, disturb, play

from rollout import program

# A context for which bodies of megabytes are too long, and the number of sessions whose memory is measured.
_CONTEXT, _KEPT = 131_072, 10
# The shares of the proxy's highest rate at which its latency is measured.
_SHARES = (0.5, 0.25, 0.1)
SAID = "<tool_call>\n<function=Tool1>\n<parameter=path>\n/src/module.py\n</parameter>\n</function>\n</tool_call>"


# ------------------------------------------------------------------ roles, each of which is a process


def _policy(model: str, context: int = 4_000_000) -> Any:
    from rollout.proxy.engine import Completion
    from rollout.proxy.standalone import ProxyOptions, load_policy

    make = load_policy(ProxyOptions("", model, "qwen3_coder", any_family=True))

    class Null:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            return Completion(list(ids), [-0.5] * len(ids))

    policy = make(Null(), context)
    ids = [*policy.tokenizer.encode(SAID, add_special_tokens=False), *policy.end_ids]
    return policy


async def serve(model: str, context: str) -> None:
    """Run this proxy with the null engine."""
    from rollout.proxy.garbage import collect_rarely, keep_imports
    from rollout.proxy.standalone import ProxyOptions, StandAlone

    server = StandAlone(ProxyOptions("http://127.0.0.1:9", model, "qwen3_coder", max_sessions=1000))
    server.policy = _policy(model, int(context))
    keep_imports()  # as StandAlone.load does
    collect_rarely()
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


async def memory(model: str) -> None:
    """Play episodes of 300 turns; print the tokens of one, the sampled ones, and the bytes that this process grew by.

    Two fifths of the tokens are sampled. Each of these is a number of its own in memory, and so is its log-probability,
    as an engine's answer has them.
    """
    from rollout.proxy.engine import Completion
    from rollout.proxy.replies import reply_json
    from rollout.proxy.session import Session
    from rollout.proxy.wire import decode_request

    policy, own, kept, drawn = _policy(model), psutil.Process(), [], random.Random(1)
    control = {*policy.tokenizer.added_tokens_decoder, *policy.end_ids}
    plain = sorted({*policy.tokenizer.get_vocab().values()} - control)

    class Speaking:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            ids = [int(str(drawn.choice(plain))) for _ in range(250)] + [*policy.end_ids][:1]
            return Completion(ids, [-drawn.random() for _ in ids], (1,) * len(ids))

    policy = replace(policy, engine=Speaking())
    for number in range(_KEPT + 1):
        if number == 1:  # the first one has filled what all share
            gc.collect()
            before = own.memory_info().rss
        session, talk = Session(f"{number}", policy), Talk(number, 450)
        for _ in range(300):
            node = await session.prepare(decode_request(talk.body()), retry=False).reply()
            node.delivered = True
            talk.heard(json.dumps(reply_json(node.reply, "policy")).encode())
        kept.append(session)
    del talk
    gc.collect()
    tree = kept[-1].tree
    print(tree.tokens, tree.sampled_tokens(), (own.memory_info().rss - before) // _KEPT)


# ------------------------------------------------------------------ the measurements


def show(what: str, value: float, unit: str, target: str = "", met: bool | None = None) -> None:
    """Print a row of the Markdown table. ``met`` says whether the target was met, None if there is none."""
    verdict = {True: "met", False: "MISSED", None: ""}[met]
    row(what, f"{value:.3g} {unit}", target, verdict)


@contextlib.contextmanager
def role(*argv: str, cores: set[int]) -> Generator[tuple[subprocess.Popen[str], int]]:
    """Run one of the roles above as a process on ``cores``; yield the process and its port."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
    process = subprocess.Popen(
        [sys.executable, __file__, *argv], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    try:
        os.sched_setaffinity(process.pid, cores)
        assert process.stdout is not None
        port = next((int(line) for line in process.stdout if line.strip().isdigit()), None)
        if port is None:
            log.seek(0)
            raise RuntimeError(f"{argv[0]} ended with status {process.wait()}:\n{log.read()[-3000:]}")
        yield process, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def shoot(load: Load, cores: set[int]) -> dict[str, Any]:
    """Run the client as a process on ``cores``; return the results of ``play``."""
    return run_client("load", json.dumps(asdict(load)), cores=cores)


def run_client(*argv: str, cores: set[int]) -> dict[str, Any]:
    """Run a role of the client on ``cores``; return what it prints."""
    process = subprocess.Popen([sys.executable, __file__, *argv], stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, cores)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with status {process.returncode}")
    return json.loads(out)


def median(load: Load, cores: set[int], runs: int = 3) -> dict[str, Any]:
    """Return the run with the median time, because other users of the machine disturb single runs."""
    seeds = random.sample(range(1 << 30), runs)
    found = [shoot(replace(load, tag=f"{load.tag}{seed}-", seed=seed), cores) for seed in seeds]
    return sorted(found, key=lambda result: result["wall"])[runs // 2]


def seconds(process: subprocess.Popen[str]) -> float:
    """Return the processor time that a process has used."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def rate(result: dict[str, Any]) -> tuple[float, float]:
    """Return turns per second and the mean latency in milliseconds."""
    took = [1e3 * t for session in result["later"] for t in session]
    return len(took) / result["wall"], statistics.mean(took)


def own(model: str, mine: set[int], others: set[int]) -> None:
    """Measure this proxy over HTTP."""
    news = []
    for _ in range(3):
        with role("serve", model, "4000000", cores=mine) as (_, port):
            news += shoot(Load(port, 1, 2, 60), others)["first"]
    show("first turn of a new process: 88 KB encoded", 1e3 * statistics.median(news), "ms")
    with role("serve", model, "4000000", cores=mine) as (process, port):
        rss = psutil.Process(process.pid).memory_info().rss
        show("resident, vLLM's parser and verl's renderer loaded", rss / 2**20, "MiB")
        used, load = seconds(process), Load(port, 32, 60, 300, tag="a")
        most, _ = rate(result := median(load, others))
        used = (seconds(process) - used) / (3 * load.sessions * load.turns)
        low, high = (size / 1e3 for size in result["bytes"])
        title = f"32 sessions, bodies {low:.0f}-{high:.0f} KB, nothing between turns: on one core"
        show(title, most, "turns/s", ">= 1000", most >= 1000)
        show("  processor time per turn, the first ones included", 1e3 * used, "ms", "< 1", used < 1e-3)
        show("  the client was busy", 100 * result["client_busy"], "% of a core")
        # At the proxy's highest rate, latency only tells how long the queue has become.
        for share in _SHARES:
            offered = most * share
            load = replace(load, think_s=load.sessions / offered, tag=f"t{share}")
            turns, mean = rate(result := median(load, others))
            later = sorted(1e3 * t for session in result["later"] for t in session)
            show(f"32 sessions, offered {share:.0%} of that", offered, "turns/s")
            show(f"  {1e3 * load.think_s:.0f} ms between turns: answered", turns, "turns/s")
            p99 = later[int(len(later) * 0.99)]
            show("  mean latency", mean, "ms")
            show("  p50", later[len(later) // 2], "ms")
            show("  p99", p99, "ms", "< 5", p99 < 5)
        first = sorted(median(Load(port, 32, 2, 300, tag="o", at_once=True), others)["first"])
        show("32 first turns at once, 88 KB, with a known system prompt and tools: p50", 1e3 * first[16], "ms")
        show("  the last of them", 1e3 * first[-1], "ms")
        result = median(Load(port, 1, 100, 60, tag="b"), others)
        took = sorted(1e3 * t for t in result["later"][0])
        for name, place, limit in (("p50", 0.5, 3), ("p99", 0.99, 15)):
            show(f"1 session: {name}", found := took[int(len(took) * place)], "ms", f"< {limit}", found < limit)
        first = 1e3 * statistics.mean(result["first"])
        show("first turn, 88 KB, with a known system prompt and tools", first, "ms", "< 15", first < 15)
        result = median(Load(port, 1, 100, 9_000, tag="c"), others)
        took = [1e3 * t for t in result["later"][0]]
        second, last = statistics.median(took[:5]), statistics.median(took[-5:])
        show(f"over HTTP: turn 100 ({result['bytes'][1] / 1e6:.2f} MB)", last, "ms")
        show("  turn 100 / turn 2", last / second, "x", "<= 3", last / second <= 3)


async def without_http(model: str) -> None:
    """Measure episodes without HTTP."""
    policy = _policy(model)
    took, session = await episode(policy, "e", 100, 9_000)
    ratio = statistics.median(took[-5:]) / statistics.median(took[1:6])
    show("without HTTP: turn 100 / turn 2", ratio, "x", "<= 3", ratio <= 3)
    ratio = (session.tree.tokens - session.tree.sampled_tokens()) / max(node.length for node in session.tree.nodes)
    show("tokens encoded / final length", ratio, "x", "<= 1.05", ratio <= 1.05)
    # The best of several times for each turn: whatever else runs on the machine can only make a time worse.
    again = [(await episode(policy, f"e{number}", 60, 300))[0] for number in range(12)]
    best = [min(times) for times in zip(*again, strict=True)]
    show("without HTTP: processor time of a turn, of turns 31 to 60", 1e6 * statistics.median(best[30:]), "us")


async def episode(policy: Any, name: str, turns: int, result_chars: int) -> tuple[list[float], Any]:
    """Play an episode without HTTP; return the processor time of each turn in seconds, and the session."""
    from rollout.proxy.replies import reply_events
    from rollout.proxy.session import Session
    from rollout.proxy.wire import decode_request

    session, talk, took = Session(name, policy), Talk(1, result_chars), []
    for _ in range(turns):
        body = talk.body()
        began = time.thread_time()
        node = await session.prepare(decode_request(body), retry=False).reply()
        out = reply_events(node.reply)
        took.append(time.thread_time() - began)
        node.delivered = True
        talk.heard(out)
    return took, session


def start_up(model: str) -> None:
    """Measure the start of the program."""
    command = [sys.executable, "-m", "rollout.proxy", "--engine", "http://127.0.0.1:9", "--model", model]
    command += ["--port", "0", "--tool-parser", "qwen3_coder"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline().startswith(b"listening on")
        took = time.perf_counter() - began
        rss = psutil.Process(process.pid).memory_info().rss / 2**20
        process.terminate()
    show("start to open port", took, "s", "< 2", took < 2)
    show("  resident then (nothing of verl or vLLM)", rss, "MiB", "< 200", rss < 200)


def large(model: str, mine: set[int], others: set[int]) -> None:
    """Measure what a request that is too long costs another session, and the proxy's memory."""
    for shape, size in [("text", 1), ("text", 8), *((shape, 16) for shape in SHAPES)]:
        with role("serve", model, str(_CONTEXT), cores=mine) as (process, port):
            found = run_client("disturb", str(port), str(size * 10**6), shape, cores=others)
            grown = Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        show(f"a body of {size} MB ({shape}), refused", found["refused"][0], "s")
        show("  sent again, refused", found["refused"][1], "s")
        worst = 1e3 * found["beside"]
        show("  longest turn of another session meanwhile", worst, "ms", "< 50", worst < 50)
        show("  before", 1e3 * found["alone"], "ms")
        show("  peak of the process", int(grown) / 2**10, "MiB")


def sizes(model: str, mine: set[int], others: set[int]) -> None:
    """Measure the memory of a session."""
    done = subprocess.run([sys.executable, __file__, "memory", model], stdout=subprocess.PIPE, text=True, check=True)
    tokens, sampled, size = map(int, done.stdout.split()[-3:])
    what = f"memory of a session of 300 turns and {tokens:,} tokens, {sampled:,} of them sampled"
    show(what, size / 2**20, "MiB", "< 20", size < 20 << 20)
    show("  of 1,000 such sessions", 1000 * size / 2**30, "GiB")


@contextlib.contextmanager
def with_schemas(model: str) -> Generator[str]:
    """Yield a copy of a model's directory in which the quickstart's template writes the whole schemas of tools."""
    with tempfile.TemporaryDirectory() as directory:
        for file in Path(model).iterdir():
            (Path(directory) / file.name).symlink_to(file.resolve())
        template = Path(directory) / "chat_template.jinja"
        said = template.read_text().replace("'\\n' ~ signature(tool)", "'\\n' ~ tool | tojson")
        template.unlink()
        template.write_text(said)
        yield directory


def main() -> None:
    """Run all measurements, or one role if the first argument is its name."""
    roles: dict[str, Callable[..., Any]] = {
        "serve": lambda model, context: uvloop.run(serve(model, context)),
        "memory": lambda model: uvloop.run(memory(model)),
        "disturb": lambda port, size, shape: print(json.dumps(uvloop.run(disturb(int(port), int(size), shape)))),
        "load": lambda load: print(json.dumps(uvloop.run(play(Load(**json.loads(load)))))),
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        return roles[sys.argv[1]](*sys.argv[2:])
    parser = program.parser("python scripts/bench_proxy.py", __doc__)
    parser.add_argument("--model", required=True)
    parts: dict[str, Callable[..., None]] = {
        "start": lambda model, *_: start_up(model),
        "in-process": lambda model, *_: asyncio.run(without_http(model)),
        "http": own,
        "large": large,
        "memory": sizes,
    }
    parser.add_argument("--only", choices=parts, action="append", help="measure only this part; may be repeated")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    mine, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    print(f"{time.strftime('%Y-%m-%d')}, {len(cores)} cores, {platform.machine()}")
    head("what", "measured", "target", "")
    with with_schemas(args.model) as model:
        for name in args.only or parts:
            parts[name](model, mine, others)


if __name__ == "__main__":
    main()
