"""What a run keeps outside its directory while it lives, and takes along: sockets and temporary files."""

import os
import shutil
import tempfile
from pathlib import Path


def socket_directory(note: Path) -> str:
    """A directory for the sockets of episodes (RL_SOCKET_DIR) and of vLLM; its path is noted in the file ``note``.

    Not inside the run directory: a unix socket's path may have 107 characters, and Ray adds about 65.
    That of an earlier, killed process with the same note is removed.

    The processes that this one starts get a directory of their own for temporary files too, on the disk that TMPDIR
    names: verl, vLLM and wandb leave theirs behind. Boxes stay beside it (RL_BOX_DIR): what a killed process leaves of
    them is found by any other (``rollout.sandbox.local.box``). So does what torch compiled.
    """
    remove_socket_directory(note)
    outside = os.environ.get("RL_BOX_DIR") or tempfile.gettempdir()  # rl.cluster starts rl.train
    path = tempfile.mkdtemp(prefix="rl-", dir=min(outside, "/tmp", key=len))
    note.write_text(path)
    own = tempfile.mkdtemp(prefix="rl-tmp-", dir=outside)
    _temporary(note).write_text(own)
    os.environ["RL_SOCKET_DIR"] = os.environ["VLLM_RPC_BASE_PATH"] = path
    os.environ["RL_BOX_DIR"] = outside
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(outside, f"torchinductor_{os.getuid()}")))
    os.environ["TMPDIR"] = tempfile.tempdir = own
    return path


def remove_socket_directory(note: Path) -> None:
    """And that of temporary files."""
    for directory in noted(note):
        if tempfile.tempdir == str(directory):  # this process goes on
            os.environ["TMPDIR"] = tempfile.tempdir = os.environ.pop("RL_BOX_DIR")
        shutil.rmtree(directory, ignore_errors=True)
    for one in (note, _temporary(note)):
        one.unlink(missing_ok=True)


def noted(note: Path) -> list[Path]:
    """The directories of ``socket_directory``, if it made them."""
    return [Path(one.read_text()) for one in (note, _temporary(note)) if one.exists()]


def _temporary(note: Path) -> Path:
    return note.with_name(f"{note.name}_tmp")
