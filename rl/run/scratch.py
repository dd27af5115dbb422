"""Sockets and temporary files that a run keeps outside its directory while it lives: make and remove them."""

import os
import shutil
import tempfile
from pathlib import Path

from rl.config.compose import ConfigError

# A unix socket's path may have 107 characters. Ray adds /rl-12345678/ray and, for instance,
# /session_2026-11-23_01-50-46_123456_1234567/sockets/plasma_store.
_LONGEST = 107 - 16 - 65


def socket_directory(note: Path, local_dir: str | None = None) -> str:
    """Make a directory for the sockets of episodes (RL_SOCKET_DIR) and of vLLM, and return its path.

    The path is written to the file ``note``. What an earlier, killed process has noted there is removed first. The
    directory is not inside the run directory, whose path may be too long for sockets. Only this user can enter it.

    local_dir: config.cluster.local_dir, below which everything is made. None: TMPDIR, and for sockets /tmp if that is
    shorter. Raises ConfigError if it is too long or cannot be written.

    The processes that this one starts also get a TMPDIR of their own, on the disk of the current one, because verl,
    vLLM and wandb leave temporary files behind. Sandboxes stay beside it (RL_BOX_DIR), where any later process finds
    and removes those of a killed one (``rollout.sandbox.directory``). torch's compile cache stays there too, to be used
    again.
    """
    remove_socket_directory(note)
    if local_dir is None:
        outside = os.environ.get("RL_BOX_DIR") or tempfile.gettempdir()  # rl.cluster has set it when it starts rl.train
        above = min(outside, "/tmp", key=len)
    else:
        above = outside = local_directory(local_dir)
    sockets = tempfile.mkdtemp(prefix="rl-", dir=above)
    note.write_text(sockets)
    temporary = tempfile.mkdtemp(prefix="rl-tmp-", dir=outside)
    _temporary_note(note).write_text(temporary)
    os.environ["RL_SOCKET_DIR"] = os.environ["VLLM_RPC_BASE_PATH"] = sockets
    os.environ["RL_BOX_DIR"] = outside
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compile_cache(outside)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    return sockets


def compile_cache(outside: str) -> str:
    """Return the directory of torch's compile cache: the user's own choice, or one below ``outside``."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(outside, f"torchinductor_{os.getuid()}"))


def local_directory(local_dir: str) -> str:
    """Return config.cluster.local_dir as an absolute path; it is made if it is missing.

    Raises ConfigError if it cannot be written, or is too long for the sockets below it.
    """
    path = Path(local_dir).expanduser().absolute()
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(
            f"cluster.local_dir: {path} is too long for the sockets of Ray, whose paths may have 107 characters; "
            f"give a directory whose path has at most {_LONGEST}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(f"cluster.local_dir: cannot write in {path}: {error.strerror}") from error
    return str(path)


def ray_directory(sockets: str) -> str:
    """Return the directory for Ray below the one for sockets.

    It is not that one itself, because Ray lets every user write in what it is given.
    """
    return f"{sockets}/ray"


def remove_socket_directory(note: Path) -> None:
    """Remove the two directories that ``socket_directory`` noted, and restore this process's environment."""
    for directory in noted(note):
        if tempfile.tempdir == str(directory):  # this process lives on
            os.environ["TMPDIR"] = tempfile.tempdir = os.environ.pop("RL_BOX_DIR")
        for name in ("RL_SOCKET_DIR", "VLLM_RPC_BASE_PATH"):
            if os.environ.get(name) == str(directory):
                del os.environ[name]
        shutil.rmtree(directory, ignore_errors=True)
    for file in (note, _temporary_note(note)):
        file.unlink(missing_ok=True)


def noted(note: Path) -> list[Path]:
    """Return the directories that ``socket_directory`` has noted; an empty list if there are none."""
    return [Path(file.read_text()) for file in (note, _temporary_note(note)) if file.exists()]


def _temporary_note(note: Path) -> Path:
    return note.with_name(f"{note.name}_tmp")
