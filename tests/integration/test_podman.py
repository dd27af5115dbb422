"""Containers on podman's socket: tests of containers again, with a podman of this module's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from docker.errors import APIError

from rollout.sandbox import Limits
from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import boot_docker
from rollout.sandbox.docker.engine import get_engine
from tests.docker_kit import REPOSITORY, made, small_image
from tests.integration.fault_kit import OwnEngine, running, used
from tests.sandboxes import sh

# The image comes from the machine's engine. The first test of all may have to make the base image.
pytestmark = [pytest.mark.podman, pytest.mark.docker, pytest.mark.timeout(900)]

MIB = 2**20
# Where podman differs: what is run, limits, rights, the list of processes, archives, links, changes, commits, labels.
AGAIN = """
    test_exec_reports_what_a_program_did or (test_background_processes and PPID) or test_memory_and_processes
    or test_a_first_process or test_no_privileges or test_no_network or test_socket_and_binds or test_put_and_get
    or (test_diff_is_the_same and (all or link)) or test_containers_of_a_killed_process or test_a_sealed_history
"""

CONFIGURATION = """\
[engine]
exit_command_delay = 10
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{directory}/tmp"
"""


class OwnPodman(OwnEngine):
    def command(self) -> list[str]:
        # By default podman's locks are shared by all roots. crun may not know this machine's control groups.
        configuration = self.directory / "containers.conf"
        configuration.write_text(CONFIGURATION.format(directory=self.directory))
        runtime = ["--runtime", runc] if (runc := shutil.which("runc")) else []
        roots = ["--root", f"{self.data}", "--runroot", f"{self.directory}/run"]
        service = ["podman", *roots, *runtime, "system", "service", "--time=0", self.url]
        return ["env", f"CONTAINERS_CONF={configuration}", *service]


@pytest.fixture(scope="module")
def own() -> Iterator[OwnPodman]:
    image = made(small_image)
    with running(OwnPodman, image, data_mb=2000) as started:
        yield started


def test_containers_on_podman_are_as_on_docker(own: OwnPodman) -> None:
    tests = [f"tests/integration/{name}.py" for name in ("test_docker", "test_docker_images")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, "-k", " ".join(AGAIN.split())]
    environment = {**os.environ, "DOCKER_HOST": own.url, "XDG_CACHE_HOME": f"{own.directory}/cache"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


async def test_a_box_does_not_hide_its_size_from_podman(own: OwnPodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman cannot tell it while files go; then the box is stopped for that moment."""
    with used(own, monkeypatch):
        box = await boot_docker(images.Source(small_image()), limits=Limits(disk_bytes=32 * MIB))
        client, seen = get_engine().client, []
        ask = client.containers

        def containers(**options: object) -> list[dict]:
            found = ask(**options)
            if options.get("size"):
                seen.append(found[0]["State"])
                if seen[-1] != "paused":
                    raise APIError("lstat: no such file or directory")
            return found

        monkeypatch.setattr(client, "containers", containers)
        try:
            assert (await sh(box, "sleep 1; echo here")).stdout == b"here\n"
            done = await sh(box, "for n in 1 2 3; do head -c 20M /dev/zero >$n; done; sleep 60; echo here")
            assert (done.returncode, done.stdout) == (137, b"") and {*seen} == {"running", "paused"}
        finally:
            await box.close()
