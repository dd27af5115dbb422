"""This module tests the environment of a job's processes: caches, reports, models by name, a site's file, a packed
Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from rl.cluster.environment import CACHES, private, set_up, snapshot
from rl.config.compose import NO_REPORTS, ConfigError
from tests.check_kit import composed
from tests.lacks import lacks
from tests.packed_kit import small_environment

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's own disk, and an environment that is restored."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*CACHES, *NO_REPORTS, "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_caches_are_on_the_nodes_disk_unless_the_user_has_set_them(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/mine")
    assert set_up(composed("+experiment=quickstart")) == []
    place = fresh / f"claude-code-rl-{os.getuid()}"
    assert os.environ["TRITON_CACHE_DIR"] == str(place / "triton") and os.environ["VLLM_CACHE_ROOT"] == "/mine"
    assert place.stat().st_mode & 0o777 == 0o700
    assert all(os.environ[name] == value for name, value in {**NO_REPORTS, "HF_HUB_OFFLINE": "1"}.items())
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{place}: another user could write there"):
        set_up(composed("+experiment=quickstart"))
    (fresh / "link").symlink_to(place)
    with pytest.raises(ConfigError, match="another user could write there"):
        private(fresh / "link")


def test_a_model_of_the_hub_is_the_directory_that_was_downloaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    hub = fresh / "hub" / "models--some--model"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("c0ffee")
    (hub / "snapshots" / "c0ffee").mkdir(parents=True)
    (hub / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(fresh / "hub"))
    config = composed("+experiment=qwen3_4b", actor_rollout_ref__model__path="some/model")
    path = str(hub / "snapshots" / "c0ffee")
    assert set_up(config) == [f"actor_rollout_ref.model.path={path}"] and config.actor_rollout_ref.model.path == path
    assert set_up(config) == [], "it is a directory now"
    with pytest.raises(ConfigError, match=r"other/model is not in .*hub; on the login node `HF_HOME=/shared/hf"):
        snapshot("other/model")


# --- scripts/slurm

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"


def run(*argv: str | Path, cwd: Path, **environment: str) -> tuple[int, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RL_")}
    done = subprocess.run(argv, cwd=cwd, env=own | environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_sites_file_reaches_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\necho modules: $MODULES\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "mine.sh").write_text("export MODULES=cuda/12\n")
    common = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1"}
    assert run("bash", SCRIPT, cwd=ROOT, **common, RL_SITE=str(tmp_path / "mine.sh")) == (0, "modules: cuda/12\n")


def test_what_packs_an_environment_is_asked_for_first(tmp_path: Path) -> None:
    for program in ("bash", "hostname"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    command = ["bash", ROOT / "scripts" / "slurm" / "packed_env.sh", "pack", tmp_path]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 69 and done.stderr.endswith(
        ": no zstd, which packs and unpacks the environment; install it (Debian: zstd)\n"
    )


def test_a_packed_environment_runs_from_the_nodes_disk(tmp_path: Path) -> None:
    """With a Python of its own, as one in a home directory is: packed, moved, and used after the originals are gone."""
    if shutil.which("zstd") is None:
        lacks("zstd")
    clone, base, local = tmp_path / "clone", tmp_path / "python", tmp_path / "local"
    version = small_environment(clone, base)
    script = ROOT / "scripts" / "slurm" / "packed_env.sh"
    code, said = run(script, "pack", tmp_path, cwd=clone)
    assert code == 0 and said.startswith(f"{tmp_path}/env-") and said.endswith(".tar.zst\n"), said
    file = said.strip()
    assert run(script, "pack", tmp_path, cwd=clone) == (0, said), "made once"
    for gone in (clone / ".venv", base):
        gone.rename(gone.with_name(f"{gone.name}-gone"))
    ask = "import ours, os, sys; print(ours.NAME, sys.prefix, os.__file__)"
    place = local / f"claude-code-rl-{os.getuid()}" / Path(file).name.removesuffix(".tar.zst")
    expected = f"{place}/venv/lib/{version}/site-packages/ours.py {place}/venv {place}/base/lib/{version}/os.py\n"
    for _ in range(2):
        assert run(script, "run", file, "-c", ask, cwd=clone, RL_LOCAL=str(local)) == (0, expected)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    code, said = run(script, "run", tmp_path / "none.tar.zst", "-c", ask, cwd=clone, RL_LOCAL=str(local))
    assert code == 69 and "cannot unpack" in said, said


def test_the_batch_script_starts_a_packed_environment(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1"}
    packed = tmp_path / "e.tar.zst"
    packed.touch()
    code, said = run("bash", SCRIPT, "a=b", cwd=ROOT, **job, RL_ENV="packed", RL_IMAGE=str(packed))
    assert code == 0 and said.endswith(f"scripts/slurm/packed_env.sh run {packed} -m rl.cluster a=b\n"), said
