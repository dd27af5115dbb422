"""Tell podman what makes its containers what Docker makes of the same request."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import docker

from rollout.files import write
from rollout.sandbox import SandboxError, failed

# Podman lets every process make namespaces, in which it has all capabilities, and use the keys that a user's processes
# share. Docker allows only the last two of these calls, without flags for namespaces, unless a process has
# capabilities.
_REFUSED = (
    *("fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree", "pivot_root"),
    *("setns", "umount", "umount2", "unshare", "keyctl", "clone3", "clone"),
)
_CLONE_NEW = 0x7E020000  # the flags of clone for namespaces
_EPERM, _ENOSYS = 1, 38


def is_podman(version: Mapping[str, Any]) -> bool:
    """Return whether an engine is podman, by its answer to `version`."""
    return any(part["Name"] == "Podman Engine" for part in version.get("Components") or ())


def ulimits(most: int) -> dict[str, int]:
    """Return limits of descriptors and processes for containers that do not name their own.

    Podman before 4.6 would raise them to 1048576, which takes CAP_SYS_RESOURCE; for a root without it, no container
    would start. most: `most_processes` of the engine's machine.
    """
    return {"nofile": 4096, "nproc": most}


def most_processes() -> int:
    """Return podman's own limit of processes on this machine, which is pid_max, or less if it inherited less."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    own = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return most if own == resource.RLIM_INFINITY else min(own, most)


def seccomp(client: docker.APIClient, directory: Path, read: Callable[[str], str]) -> Path | None:
    """Write the engine's own filter of system calls, without what Docker refuses, to a directory; returns the file.

    None if the engine uses no filter. read: returns the text of a file of the engine's machine. Blocks. Raises
    SandboxError boot_failed.
    """
    answer = client.get(f"{client.base_url}/v4.0.0/libpod/info")
    answer.raise_for_status()
    security = answer.json()["host"]["security"]
    if not security["seccompEnabled"] or not security["seccompProfilePath"]:
        return None
    try:
        profile = narrowed(json.loads(read(security["seccompProfilePath"])))
    except (OSError, SandboxError) as error:
        raise failed("boot_failed", f"podman's filter of system calls cannot be read here: {error}") from error
    file = directory / "seccomp.json"
    write(file, json.dumps(profile))  # other processes write the same
    return file


def narrowed(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return a seccomp profile without `_REFUSED`.

    Programs that are told that clone3 does not exist use clone, whose flags a filter can see.
    """
    rules = []
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW" and not (rule.get("includes") or {}).get("caps"):
            rule = {**rule, "names": [name for name in rule["names"] if name not in _REFUSED]}
        if rule["names"]:
            rules.append(rule)
    flags = {"index": 0, "value": _CLONE_NEW, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules += [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [flags]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        {"names": list(_REFUSED[:-2]), "action": "SCMP_ACT_ERRNO", "errnoRet": _EPERM},
    ]
    return {**profile, "syscalls": rules}
