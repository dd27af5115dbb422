"""This module tests `exec`, on every kind of box: a program's input, output and end, its environment, what it leaves
running.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys

import pytest

from rollout.sandbox import Sandbox
from tests.boxes.kinds import BoxKit
from tests.sandboxes import alive, sh

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_result_says_how_the_program_ended(shared: Sandbox) -> None:
    done = await sh(shared, "pwd; echo oops >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{shared.workdir}\n".encode(), b"oops\n")
    assert not done.timed_out and not done.truncated and 0 < done.wall_s < 30
    assert (await sh(shared, "kill -TERM $$")).returncode == 128 + 15
    assert (await sh(shared, "kill -KILL $$")).returncode == 128 + 9  # the box itself is not said to have failed
    assert (await sh(shared, "echo FATAL: >&2; exit 255")).returncode == 255  # as apptainer itself fails
    assert (await shared.exec(["/no/such/program"], env={}, timeout_s=30)).returncode in (126, 127)


async def test_stdin_reaches_the_program_and_ends(shared: Sandbox) -> None:
    data = os.urandom(300_000)
    assert (await shared.exec(["cat"], env={}, timeout_s=30, stdin=data)).stdout == data
    ignored = await shared.exec(["true"], env={}, timeout_s=30, stdin=b"x" * 10**6)
    assert ignored.returncode == 0


async def test_output_is_capped_per_stream_and_never_blocks(shared: Sandbox) -> None:
    done = await sh(shared, "head -c 3000000 /dev/zero; echo -n 1234567 >&2", output_cap=5)
    assert (done.stdout, done.stderr, done.truncated, done.returncode) == (b"\0" * 5, b"12367", True, 0)
    assert not (await sh(shared, "echo -n 12345; echo -n 54321 >&2", output_cap=5)).truncated


async def test_a_program_may_close_its_output_and_go_on(shared: Sandbox) -> None:
    assert (await sh(shared, "exec >&- 2>&-; sleep 0.3; echo end > end; exit 4")).returncode == 4
    assert await shared.get("end") == b"end\n"


async def test_the_environment_is_built_from_nothing(
    kind: BoxKit, shared: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "leak")
    given = {"GIVEN": "a b\nc", "LD_GIVEN": "2"}
    done = await shared.exec(["env", "-0"], env=given, timeout_s=30)
    found = dict(line.split("=", 1) for line in done.stdout.decode().split("\0")[:-1])
    assert re.fullmatch(kind.path, found.pop("PATH"))
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):
        found.pop(name, None)  # shells set these
    own = {"HOME": shared.home, "TMPDIR": shared.tmpdir, "LANG": "C.UTF-8"}
    assert found == {**own, **kind.sets, **given}
    done = await shared.exec(["sh", "-c", "echo $HOME"], env={"HOME": "/elsewhere"}, timeout_s=30)
    assert done.stdout == b"/elsewhere\n"


async def test_no_descriptor_is_inherited_or_leaked(shared: Sandbox) -> None:
    with open("/dev/null") as file:
        os.set_inheritable(file.fileno(), True)
        done = await shared.exec(["ls", "/proc/self/fd"], env={}, timeout_s=30)
    assert done.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3: the directory that ls reads
    counts: list[int] = []
    # A container engine's client keeps some connections, and needs a few rounds to have them all.
    while len(counts) < 4 or (len(counts) < 30 and len(set(counts[-4:])) > 1):
        await sh(shared, "true")
        await sh(shared, "sleep 9", timeout_s=0.05)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[-4], counts


async def test_python_git_and_the_boxs_directories_work(kind: BoxKit, shared: Sandbox) -> None:
    script = 'touch "$HOME/a" "$TMPDIR/b" c && python3 -c "import sys; print(sys.prefix)" && git status --short c; rm c'
    done = await sh(shared, script)
    prefix, status = done.stdout.decode().splitlines()
    assert (status, done.stderr) == ("?? c", b"") and (prefix == sys.prefix or kind.name not in ("plain", "bwrap"))


async def test_programs_at_the_same_time_share_the_files(kind: BoxKit, shared: Sandbox) -> None:
    script = 'for i in 1 2 3; do echo {0} >> "$HOME/log"; sleep 0.05; done; touch "$HOME/{0}" "$TMPDIR/{0}"'
    done = await asyncio.gather(*(sh(shared, script.format(name)) for name in "abc"))
    assert [one.returncode for one in done] == [0, 0, 0]
    log = "".join((await shared.get(f"{shared.home}/log")).decode().split())
    assert sorted(log) == sorted("abc" * 3)
    assert not kind.serial or re.fullmatch(r"(aaa|bbb|ccc)+", log)
    assert (await sh(shared, 'ls "$HOME/a" "$HOME/b" "$HOME/c" "$TMPDIR/a" "$TMPDIR/b"')).returncode == 0


# --- nothing outlives its exec


@pytest.mark.parametrize(
    "spawn",
    [
        "sleep {0} &",
        "(setsid sleep {0} &)",
        "(setsid env -i sleep {0} &)",
        "nohup sleep {0} >/dev/null 2>&1 &",
    ],
)
async def test_background_processes_end_with_the_exec(shared: Sandbox, spawn: str, nap: str) -> None:
    done = await sh(shared, spawn.format(nap) + "\nsleep 0.05; echo done | tee done")
    assert done.stdout == b"done\n" and done.wall_s < 60 and not alive(nap)
    assert (await sh(shared, "cat done")).stdout == b"done\n"  # the box goes on, with its files


async def test_a_timeout_ends_all_and_the_files_stay(shared: Sandbox, nap: str) -> None:
    script = f"echo 1 > one; (setsid env -i sleep {nap} &) ; echo begun; bash -c 'sleep {nap}; true'; true"
    for timeout_s in (0.6, 3, 15):  # on a busy machine a program starts late
        done = await sh(shared, script, timeout_s)
        assert done.timed_out and done.returncode is None and done.wall_s < timeout_s + 20 and not alive(nap)
        if done.stdout:
            break
    assert (done.stdout, done.stderr) == (b"begun\n", b"")
    assert (await sh(shared, "cat one")).stdout == b"1\n"
