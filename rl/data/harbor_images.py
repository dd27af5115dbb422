"""Images of Harbor tasks: a task's own image, or its environment/Dockerfile, as boxes are made of it.

A last layer makes the work directory, a HOME and the environment's variables, and a label says where the work tree is
and whether it is a repository, whose history is sealed then like that of any task.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import requests
import urllib3
from docker.errors import APIError, DockerException

from rewards.harbor import SEPARATE
from rewards.task import Task
from rl.data import harbor
from rollout.sandbox import HOME, SandboxError
from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import PROJECT, ContainerEngine, checked

# Run as root in the image. Arguments: work directory, user, HOME. Prints uid, gid, and 1 or 0 for a repository and for
# git.
_FIT = """
set -eu
mkdir -p "$1" "$3"
name=${2%%:*}
case $2 in *:*) group=${2#*:} ;; *) group= ;; esac
case $name in *[!0-9]*) uid=$(id -u "$name") ;; *) uid=$name ;; esac
case $group in
  '') gid=$(id -g "$name" 2>/dev/null || echo 0) ;;
  *[!0-9]*) gid=$(sed -n "s/^$group:[^:]*:\\([0-9]*\\):.*/\\1/p" /etc/group) ;;
  *) gid=$group ;;
esac
[ "$uid:$gid" = 0:0 ] || chown "$uid:$gid" "$3"
rm -rf /tests /solution
if find "$1" -xdev -iname .git -print | grep -q .; then repository=1; else repository=0; fi
if command -v git >/dev/null; then git=1; else git=0; fi
echo "$uid $gid $repository $git"
"""
_FIT_S = 600.0


class BuildFailed(Exception):
    """A task's image cannot be made of what the task brings. The message is one line."""


def build(engine: ContainerEngine, task: Task) -> bool:
    """Build the image of a task unless it is there; return whether it was built. Blocks.

    Raises BuildFailed, SandboxError, DockerException.
    """
    if not images.missing(engine, [task.image]):
        return False
    wanted, directory = task.asked["environment"], task.directory
    assert directory is not None
    if harbor.image_name(directory, wanted) != task.image:
        raise BuildFailed("environment/ is not what it was when the task was converted; convert it again")
    if given := wanted["docker_image"]:
        if images.missing(engine, [given]):
            try:
                images.pull(engine, given)
            except SandboxError as error:
                raise BuildFailed(str(error)) from error
        _fit(engine, given, task)
        return True
    raw = f"{PROJECT}/harbor-raw:{task.image.rpartition(':')[2]}"
    _dockerfile(engine, directory / "environment", raw, wanted["build_timeout_s"])
    try:
        _fit(engine, raw, task)
    finally:
        with contextlib.suppress(DockerException):
            engine.client.remove_image(raw)  # the name only
    return True


def _dockerfile(engine: ContainerEngine, context: Path, name: str, timeout_s: float) -> None:
    """Build a Dockerfile; its base images must be there, or in a registry that the engine reaches."""
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(context, ".")
    buffer.seek(0)
    how: dict[str, Any] = {"custom_context": True, "encoding": "gzip", "rm": True, "forcerm": True, "decode": True}
    end = time.monotonic() + timeout_s
    try:
        for line in engine.client.build(fileobj=buffer, tag=name, timeout=math.ceil(timeout_s), **how):
            if time.monotonic() > end:
                raise requests.Timeout
            if "error" in line:
                raise BuildFailed(" ".join(f"environment/Dockerfile: {line['error']}".split()))
    except APIError as error:  # the engine cannot read it
        raise BuildFailed(" ".join(f"environment/Dockerfile: {error.explanation}".split())) from error
    except (requests.Timeout, urllib3.exceptions.ReadTimeoutError) as error:
        raise BuildFailed(f"environment/Dockerfile: it is not built after {timeout_s:g} s") from error


def _fit(engine: ContainerEngine, image: str, task: Task) -> None:
    wanted, config = task.asked["environment"], engine.client.inspect_image(image)["Config"]
    workdir = wanted["workdir"] or config.get("WorkingDir") or "/"
    if not workdir.startswith("/") or workdir.strip("/") in ("", "tmp", "tests", "logs", "solution"):
        raise BuildFailed(
            f"its work directory is {workdir}, all of which would be compared with the image; set workdir"
        )
    program = {"command": [workdir, config.get("User") or "0:0", HOME], "entrypoint": ["bash", "-c", _FIT, "fit"]}
    with engine.helper(image, {"security_opt": engine.security_opt}, user="0:0", **program) as container:
        try:
            engine.client.start(container)
            status = engine.client.wait(container, timeout=_FIT_S)["StatusCode"]
        except (DockerException, requests.Timeout, requests.ConnectionError) as error:
            raise BuildFailed(f"is there no bash in the image? {' '.join(str(error).split())[-200:]}") from error
        said = " ".join(engine.client.logs(container).decode(errors="replace").split())
        if status or not re.fullmatch(r"\d{1,9} \d{1,9} [01] [01]", said, re.ASCII):
            raise BuildFailed(f"the image cannot be fitted: exit status {status}: {said[-300:]}")
        uid, gid, repository, git = map(int, said.split())
        if not git and (repository or task.asked["mode"] == SEPARATE):
            why = "its history is sealed with git" if repository else "a patch is applied with git"
            raise BuildFailed(f"there is no git in the image: {why}")
        label = images.written({"workdir": workdir, "uid": uid, "gid": gid, "git": bool(repository)})
        changes = [f"LABEL {images.TREE}={label}", f"USER {uid}:{gid}", f"WORKDIR {workdir}", "ENTRYPOINT []"]
        changes += [f'ENV {key}="{_quoted(value)}"' for key, value in wanted["env"].items()]
        checked("docker_failed", engine.client.commit, container, *task.image.rsplit(":", 1), changes=changes)


def _quoted(value: str) -> str:
    """Return a value for an instruction, in which quotes, backslashes and dollars have a meaning."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
