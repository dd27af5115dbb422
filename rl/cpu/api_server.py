"""Run vLLM's API server on a CPU, with an engine that is a fork of it and has no process for its worker.

    python -m rl.cpu.api_server [what vllm.entrypoints.openai.api_server takes]

On a CPU vLLM starts its engine as a Python of its own, because OpenMP's threads do not outlive a fork; that imports
everything again (10 s of a core). With OMP_NUM_THREADS=1, as training on a CPU has it, there are no such threads. When
``rl.run.forks`` imports this module, it thereby imports what server and engine need.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.worker.cpu_worker

SERVER = vllm.entrypoints.openai.api_server.__name__
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # as in configs/cpu.yaml


def main() -> None:
    """Run the server."""
    forking = multiprocessing.get_context("fork")
    vllm.v1.engine.utils.get_mp_context = lambda: forking  # ty: ignore[invalid-assignment]
    sys.argv[1:1] = ["--distributed-executor-backend", EXECUTOR]  # first: the user's own, which comes later, counts
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
