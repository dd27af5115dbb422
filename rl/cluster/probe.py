"""One process of the all-reduces before a job (``rl.cluster.preflight``), or the store at which they meet.

    python -m rl.cluster.probe store            prints {"port"} and serves until its input ends
    python -m rl.cluster.probe gloo|nccl RANK   RANK: of this process on its node, and of its GPU

When torch is imported it prints {}. It reads a line of JSON per all-reduce ("name", "host" and "port" of the store,
"rank", "world", "mib", "timeout_s") and answers with one: {"gbs"}, the bus bandwidth in GB/s, or {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMES = 3


def all_reduce(backend: str, local_rank: int, order: dict[str, Any]) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, the best of three.

    Raises:
        ValueError: its result is wrong.
        RuntimeError: torch's, if the others do not come or the connection fails.
    """
    timeout, world = timedelta(seconds=order["timeout_s"]), order["world"]
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    store = dist.TCPStore(order["host"], order["port"], timeout=timeout)
    shared = dist.PrefixStore(order["name"], store)
    dist.init_process_group(backend, store=shared, rank=order["rank"], world_size=world, timeout=timeout)
    try:
        data = torch.empty(order["mib"] << 18, device=device)
        dist.all_reduce(data[:1024].fill_(1))  # connects
        best = float("inf")
        for _ in range(_TIMES):
            data.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(data)
            if backend == "nccl":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
            if not bool((data == world).all()):
                raise ValueError("the all-reduce gave wrong numbers")
        return 2 * (world - 1) / world * data.nbytes / best / 1e9
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.argv[1] == "store":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(json.dumps({"port": store.port}), file=answers)
        sys.stdin.read()
        return
    print("{}", file=answers)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"gbs": all_reduce(sys.argv[1], int(sys.argv[2]), json.loads(line))}
        except (RuntimeError, ValueError) as error:
            answer = {"error": " ".join(str(error).split())[:200]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
