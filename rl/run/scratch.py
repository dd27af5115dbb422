"""This module makes and removes what a run keeps outside its directory while it lives: sockets and temporary files."""

import os
import shutil
import tempfile
from pathlib import Path


def socket_directory(note: Path) -> str:
    """Make a directory for the sockets of episodes (RL_SOCKET_DIR) and of vLLM, and return its path.

    The path is written to the file ``note``. What an earlier, killed process has noted there is removed first. The
    directory is not inside the run directory: a unix socket's path may have 107 characters, and Ray adds about 65.

    The processes that this one starts also get a TMPDIR of their own, on the disk of the current one, because verl,
    vLLM and wandb leave temporary files behind. Sandboxes stay beside it (RL_BOX_DIR), where any later process finds
    and removes those of a killed one (``rollout.sandbox.directory``). torch's compile cache stays there too, to be used
    again.
    """
    remove_socket_directory(note)
    outside = os.environ.get("RL_BOX_DIR") or tempfile.gettempdir()  # rl.cluster has set it when it starts rl.train
    sockets = tempfile.mkdtemp(prefix="rl-", dir=min(outside, "/tmp", key=len))
    note.write_text(sockets)
    temporary = tempfile.mkdtemp(prefix="rl-tmp-", dir=outside)
    _temporary_note(note).write_text(temporary)
    os.environ["RL_SOCKET_DIR"] = os.environ["VLLM_RPC_BASE_PATH"] = sockets
    os.environ["RL_BOX_DIR"] = outside
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(outside, f"torchinductor_{os.getuid()}")))
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    return sockets


def remove_socket_directory(note: Path) -> None:
    """Remove the two directories that ``socket_directory`` noted, and restore this process's TMPDIR."""
    for directory in noted(note):
        if tempfile.tempdir == str(directory):  # this process lives on
            os.environ["TMPDIR"] = tempfile.tempdir = os.environ.pop("RL_BOX_DIR")
        shutil.rmtree(directory, ignore_errors=True)
    for file in (note, _temporary_note(note)):
        file.unlink(missing_ok=True)


def noted(note: Path) -> list[Path]:
    """Return the directories that ``socket_directory`` has noted; an empty list if there are none."""
    return [Path(file.read_text()) for file in (note, _temporary_note(note)) if file.exists()]


def _temporary_note(note: Path) -> Path:
    return note.with_name(f"{note.name}_tmp")
