"""Git repositories whose commits have the same ids whenever and wherever they are made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SETTINGS = ("-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.autocrlf=false")
_SETTINGS += ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")


def git(directory: Path, *arguments: str, author: str = "tasks") -> bytes:
    """Run git in a directory without a user's settings or hooks; return its output. Raises CalledProcessError."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent),
    }
    for who in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{who}_NAME"], environment[f"GIT_{who}_EMAIL"] = author, f"{author}@example.com"
        environment[f"GIT_{who}_DATE"] = "2025-01-01T00:00:00+0000"
    command = ["git", *_SETTINGS, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True).stdout


def write_repositories(directory: Path, trees: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Write one repository with one commit per task, and return the commit ids by instance id.

    directory: is made. trees: the texts of a task's files, by instance id and name.
    """
    directory.mkdir()
    template = directory / ".template"
    git(directory, "init", "--quiet", "--template=", "--initial-branch=main", str(template))
    commits = {}
    for instance_id, texts in trees.items():
        repository = directory / instance_id
        shutil.copytree(template, repository)
        (repository / ".gitignore").write_text("__pycache__/\n*.pyc\n")
        for name, text in texts.items():
            (repository / name).write_text(text)
        git(repository, "add", "--all")
        message = ("--no-verify", "--no-gpg-sign", "--message=Add the module")
        git(repository, "commit", "--quiet", *message, author="quickstart")
        commits[instance_id] = (repository / ".git/refs/heads/main").read_text().strip()
    shutil.rmtree(template)
    return commits
