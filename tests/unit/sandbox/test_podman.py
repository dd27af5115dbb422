"""This module tests what podman is told, without podman; what engines' errors mean."""

import pytest
from docker.errors import NotFound

from rollout.sandbox.docker import podman
from rollout.sandbox.docker.engine import translated


def test_its_filter_loses_namespaces_and_nothing_else() -> None:
    ask, clock = {"caps": ["CAP_SYS_ADMIN"]}, {"caps": ["CAP_SYS_TIME"]}
    kept = [
        {"names": ["userfaultfd", "mount"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
        {"names": ["setns", "bpf"], "action": "SCMP_ACT_ALLOW", "includes": ask},  # boxes have no capabilities
        {"names": ["stime"], "action": "SCMP_ACT_ALLOW", "includes": clock},
    ]
    open_to_all = [
        {"names": ["read", "clone", "clone3", "unshare", "write"], "action": "SCMP_ACT_ALLOW", "includes": {}},
        {"names": ["mount", "umount2"], "action": "SCMP_ACT_ALLOW"},
    ]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [*kept, *open_to_all]}
    narrow = podman.narrowed(profile)
    assert narrow["defaultAction"] == "SCMP_ACT_ERRNO" and narrow["syscalls"][:3] == kept
    rest = narrow["syscalls"][3:]
    allowed = [(rule["names"], rule.get("args")) for rule in rest if rule["action"] == "SCMP_ACT_ALLOW"]
    new_user, thread = 0x10000000, 0x3D0F00  # CLONE_NEWUSER; what a thread is made with
    (plain, _), (clone, (flags,)) = allowed
    assert (plain, clone) == (["read", "write"], ["clone"]) and flags["op"] == "SCMP_CMP_MASKED_EQ"
    assert (new_user & flags["value"], thread & flags["value"]) == (new_user, flags["valueTwo"])
    refused = {name: rule["errnoRet"] for rule in rest if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]}
    assert (refused["clone3"], refused["unshare"], refused["mount"]) == (38, 1, 1)  # ENOSYS: then glibc takes clone
    assert "clone" not in refused and len(profile["syscalls"]) == 5


@pytest.mark.parametrize(
    "text", ["No such container: 3f", 'no container with name or ID "3f" found: no such container']
)
def test_a_container_that_is_gone_was_removed_from_outside(text: str) -> None:
    assert translated(NotFound("404", explanation=text), "docker_failed").cause == "box_killed"
    assert translated(NotFound("404", explanation="No such image: x"), "docker_failed").cause == "missing_image"
    path = translated(NotFound("404", explanation="Could not find the file /x in container 3f"), "docker_failed")
    assert path.cause == "docker_failed"
