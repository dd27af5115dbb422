"""This module tests scripts/setup.sh: which Python it takes, and what it says at its end. Programs that download are
stand-ins.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = "bash cat cc chmod cut dirname env find flock grep mkdir mv rm sed sha256sum tail tee"

# Answers as the version that is its name's, makes an environment of stand-ins, and installs nothing.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"-m venv"*)
    mkdir -p .venv/bin
    cat "$0" >.venv/bin/python
    echo '[[ "$*" != *flash-attn.txt* ]] || [ ! -e unreachable ]' >.venv/bin/uv
    sed -i '1i #!/usr/bin/env bash' .venv/bin/uv
    chmod +x .venv/bin/*
    echo "took $0" ;;
  --version) echo "Python NAME" ;;
esac
"""
REFUSES = "#!/usr/bin/env bash\necho 'pyenv: command not found' >&2\nexit 127\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone without an environment, and in ``bin`` the programs that setup.sh finds."""
    for name in ("constraints", "packaging", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS.split():
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / "bin" / tool).symlink_to(path)
    return tmp_path


def program(clone: Path, name: str, text: str = PYTHON) -> None:
    (clone / "bin" / name).write_text(text.replace("NAME", name))
    (clone / "bin" / name).chmod(0o755)


def setup(clone: Path, extra: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [clone / "scripts" / "setup.sh", extra]
    env = {"PATH": str(clone / "bin"), "HOME": str(clone), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("extra", "there", "refusing", "taken"),
    [
        ("cpu", ["python3.11", "python3.12"], [], "python3.11"),
        ("cpu", ["python3.12"], ["python3.11"], "python3.12"),
        ("gpu", ["python3.11", "python3.12"], [], "python3.12"),
        ("gpu", ["python3.11"], ["python3.12"], "python3.11"),
    ],
)
def test_the_python_that_runs_is_taken(
    extra: str, there: list[str], refusing: list[str], taken: str, clone: Path
) -> None:
    for name in there:
        program(clone, name)
    for name in refusing:
        program(clone, name, REFUSES)
    done = setup(clone, extra)
    assert f"bin/{taken}\n" in done.stdout, done.stderr
    assert (clone / ".venv" / ".setup").exists()
    assert setup(clone, extra).stdout == ""  # nothing changed


def test_a_given_python_is_taken_or_none(clone: Path) -> None:
    program(clone, "python3.11")
    program(clone, "mine")
    assert "bin/mine\n" in setup(clone, "cpu", PYTHON=str(clone / "bin" / "mine")).stdout
    shutil.rmtree(clone / ".venv")
    done = setup(clone, "cpu", PYTHON="/nowhere/python3.12")
    assert done.returncode == 1 and "no Python 3.11 or 3.12 with the module venv (tried: /nowhere" in done.stderr


def test_without_a_python_one_line_says_so(clone: Path) -> None:
    program(clone, "python3.12", REFUSES)
    done = setup(clone, "gpu")
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: no Python 3.11 or 3.12 with the module venv (tried: python3.12 python3.11); install")


def test_a_real_python_of_another_version_is_not_taken(clone: Path) -> None:
    """The check itself runs in a real Python, of this environment."""
    check = (ROOT / "scripts" / "setup.sh").read_text().split("""-c 'import sys, venv""")[1].split("'")[0]
    for version, code in (((3, 11), 0), ((3, 12), 0), ((3, 13), 1), ((3, 10), 1)):
        code_text = f"import sys; sys.version_info = {version}; import venv{check}"
        done = subprocess.run([sys.executable, "-c", code_text], capture_output=True)
        assert done.returncode == code, version


def test_where_flash_attn_cannot_be_had_the_command_is_named(clone: Path) -> None:
    program(clone, "python3.12")
    (clone / "unreachable").touch()
    done = setup(clone, "gpu")
    command = ".venv/bin/uv pip install --python .venv --no-deps -r constraints/flash-attn.txt"
    assert done.returncode == 0 and f"missing: {command}" in done.stdout, done.stderr
    shutil.rmtree(clone / ".venv")
    (clone / "unreachable").unlink()
    done = setup(clone, "gpu")
    assert done.returncode == 0 and "missing" not in done.stdout
