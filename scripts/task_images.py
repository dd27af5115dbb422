"""Build container images of real software tasks, for tests and for trying out `sandbox=docker` without a registry.

    .venv/bin/python scripts/task_images.py --out DIR        # images, and DIR/tasks.parquet
    .venv/bin/python scripts/task_images.py --base           # only the base image; prints its name
    .venv/bin/python scripts/task_images.py --toolchains     # the base with Go, JavaScript, Rust and Java

The images have the form of SWE-bench's: the repository in /testbed at the commit before a fix, with the fix, a tag and
a remote in its history (which sealing must hide); an environment `testbed` that eval scripts activate as if it were
conda's, with pytest; hidden tests that come with the eval script. The tasks are small Python packages, from their own
releases, with a planted bug and without the tests that notice it. FAIL_TO_PASS and PASS_TO_PASS are what the tests did
in a box. Then every task is graded: the gold patch must resolve it, and no patch must not.

The base image is made by debootstrap, so this needs root, debootstrap and a container engine, and a mirror and an index
of packages to download from. What is there already is not made again: the base takes minutes, a task seconds. Both
bases also have a name that stays the same, claude-code-rl/base:bookworm and claude-code-rl/toolchains:bookworm.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards.grade import grade
from rewards.task import Task
from rewards.verdict import Outcome
from rl.quickstart.tasks import write_tasks
from rollout import program
from rollout.files import write
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import boot_docker
from rollout.sandbox.docker.engine import PROJECT, UNOWNED, ContainerEngine, get_engine

SUITE = "bookworm"
PACKAGES = ("git", "python3", "python3-venv")
# debootstrap does not find libc6-dev by itself: what cargo needs is named by another word.
TOOLCHAINS = ("golang-go", "nodejs", "cargo", "libc6-dev", "default-jdk-headless", "junit4")
WHEELS = ("pytest==8.3.4", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2", "wheel==0.45.1")
TIMEOUT_S = 120.0

# This does what conda's script does for eval scripts: `source .../activate`, then `conda activate testbed`.
_ACTIVATE = """\
conda() { if [ "$1" = activate ]; then export CONDA_DEFAULT_ENV=$2 PATH=/opt/miniconda3/envs/$2/bin:$PATH; fi; }
"""
_EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
git checkout {base} {tests}
git apply -v - <<'EOF_114329324912'
{patch}EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA {tests}
: '>>>>> End Test Output'
git checkout {base} {tests}
"""
_COMMIT = {"NAME": "task", "EMAIL": "task@example.com", "DATE": "2025-01-01T00:00:00+0000"}


@dataclass(frozen=True)
class Recipe:
    """A task is made from a release of a package.

    `right` in `file` becomes `wrong`; the functions `hidden` are removed from the test file `tests`.
    """

    package: str
    version: str
    file: str
    right: str
    wrong: str
    tests: str
    hidden: tuple[str, ...]
    statement: str

    @property
    def instance_id(self) -> str:
        """Return the task's instance id."""
        return f"packages__{self.package}-{self.version}"

    @property
    def image(self) -> str:
        """Return the name of the task's image, which changes with the recipe and with the base image."""
        key = _key(repr(self), _base_key())
        return f"{PROJECT}/task-{self.package}:{key}"


RECIPES = (
    Recipe(
        "inflection", "0.5.1", "inflection/__init__.py",
        "number % 100 in (11, 12, 13)", "number in (11, 12, 13)",
        "test_inflection.py", ("test_ordinal", "test_ordinalize"),
        "inflection.ordinal(111) and ordinalize(1012) give 'st' and 'nd'. Every number that ends in 11, 12 or 13 "
        "takes 'th' in English, not only these three.",
    ),
    Recipe(
        "cachetools", "5.3.3", "src/cachetools/__init__.py",
        "            return self.timer() < link.expires\n", "            return self.timer() <= link.expires\n",
        "tests/test_ttl.py", ("test_ttl", "test_ttl_tuple_key"),
        "`key in TTLCache(...)` is still true at the very moment at which the item expires, while reading it then "
        "raises KeyError. An item is there only while the time is before its expiry.",
    ),
    Recipe(
        "toolz", "0.12.1", "toolz/itertoolz.py",
        "yield prev[:len(seq) % n]", "yield prev[:len(seq) // n]",
        "toolz/tests/test_itertoolz.py", ("test_partition_all",),
        "partition_all(3, range(5)) loses elements: the last tuple is (3,) and should be (3, 4). It is right when "
        "the input is an iterator without a length.",
    ),
    Recipe(
        "schema", "0.7.7", "schema.py",
        "self.match_count > 1 and self.only_one\n        self.match_count = 0",
        "self.match_count > 2 and self.only_one\n        self.match_count = 0",
        "test_schema.py", ("test_or_only_one",),
        "Or(..., only_one=True) as a key of a dict accepts data in which two of the keys are present. It must refuse "
        "that with SchemaOnlyOneAllowedError.",
    ),
    Recipe(
        "voluptuous", "0.15.2", "voluptuous/validators.py",
        "and v > self.max:\n                v = self.max", "and v > self.max:\n                v = self.min",
        "voluptuous/tests/tests.py", ("test_clamp_above",),
        "Schema(Clamp(min=1, max=10))(12) gives 1. A value above the range should become its upper end, 10.",
    ),
    Recipe(
        "parse", "1.20.2", "parse.py",
        'expression = r"\\A%s\\Z" % self._expression', 'expression = r"\\A%s$" % self._expression',
        "tests/test_bugs.py", ("test_match_trailing_newline",),
        "parse('{}', 'test\\n') drops the newline at the end of the text: the field is 'test' instead of 'test\\n'.",
    ),
)  # fmt: skip


async def make_task(engine: ContainerEngine, recipe: Recipe) -> Task:
    """Return the verified task of a recipe; image and row are made if they are not there."""
    row_file = images.cache_dir("tasks") / f"{_key(recipe.image)}.json"
    if not row_file.exists() or await engine.call(images.missing, engine, [recipe.image]):
        row = await engine.call(_build_task, engine, recipe, cause="boot_failed")
        unsolved, solved = [await _results(Task.from_row(row, Path()), patch) for patch in (b"", row["patch"].encode())]
        passing = {name for name, status in solved.items() if status == "PASSED"}
        before = {name for name in passing if unsolved.get(name) == "PASSED"}
        row |= {"FAIL_TO_PASS": sorted(passing - before), "PASS_TO_PASS": sorted(before)}
        if not row["FAIL_TO_PASS"]:
            raise RuntimeError(f"{recipe.instance_id}: no test fails with the bug")
        task = Task.from_row(row, Path())
        await verify(task)
        write(row_file, json.dumps(task.to_row()))
    return Task.from_row(json.loads(row_file.read_text()), Path())


async def verify(task: Task) -> None:
    """Raise RuntimeError unless the gold patch resolves the task and no patch does not."""
    assert task.patch is not None
    for patch, wanted in ((task.patch.encode(), Outcome.RESOLVED), (None, Outcome.UNRESOLVED)):
        verdict = await grade(task, patch, functools.partial(_boot, task), timeout_s=TIMEOUT_S)
        if verdict.outcome is not wanted:
            seen = f"{verdict.reason}: {verdict.detail}\n{verdict.log_tail}"
            raise RuntimeError(f"{task.instance_id} should be {wanted}, but {seen}")


def base_image(engine: ContainerEngine, name: str = "base", more: Sequence[str] = ()) -> str:
    """Return the name of the image that task images are based on; it is made if it is not there (minutes). Blocks.

    name: another one's, which has more of Debian's packages.
    """
    tag = f"{PROJECT}/{name}:{_base_key(*more)}"
    with images.locked(tag):
        if images.missing(engine, [tag]):
            bare = f"{tag}-bare"
            _debootstrap(engine, bare, more)
            with tempfile.TemporaryDirectory(prefix="wheels-") as wheels:
                _pip_download(wheels, *WHEELS)
                env = "/opt/miniconda3/envs/testbed"
                script = f"""
                    python3 -m venv {env} && mkdir /opt/miniconda3/bin
                    {env}/bin/pip install --quiet --no-index --find-links /wheels --no-deps {" ".join(WHEELS)}
                    printf %s '{_ACTIVATE}' >/opt/miniconda3/bin/activate
                """
                _build(engine, bare, script, tag, Path(wheels), "/wheels")
            engine.client.remove_image(bare, noprune=True)
        engine.client.tag(tag, f"{PROJECT}/{name}", SUITE)
    return tag


def toolchains_image(engine: ContainerEngine) -> str:
    """Return the name of the base image with the tools of other languages; see `base_image`. Blocks."""
    return base_image(engine, "toolchains", TOOLCHAINS)


def build_image(engine: ContainerEngine, files: Path, tag: str, script: str = "") -> None:
    """Make an image on the base whose /testbed is a copy of a directory; `script` runs there first. Blocks."""
    copy = f"cp -a /files/. /testbed && cd /testbed\n{script}"
    _build(engine, base_image(engine), f"mkdir /testbed && {copy}", tag, files, "/files")


def _build_task(engine: ContainerEngine, recipe: Recipe) -> dict[str, str]:
    """Make the image, and return the row without its test names."""
    with images.locked(recipe.image), tempfile.TemporaryDirectory(prefix="task-") as name:
        _pip_download(name, f"{recipe.package}=={recipe.version}", "--no-binary", ":all:")
        with tarfile.open(next(Path(name).glob("*.tar.gz"))) as tar:
            tar.extractall(Path(name, "unpacked"), filter="data")
        release = next(Path(name, "unpacked").iterdir())
        base, patch, test_patch = _history(recipe, release)
        install = "/opt/miniconda3/envs/testbed/bin/pip install --quiet --no-index --no-deps --no-build-isolation -e ."
        build_image(engine, release, recipe.image, f"chown -R 0:0 . && {install}")
    return {
        "instance_id": recipe.instance_id,
        "image": recipe.image,
        "repo": f"packages/{recipe.package}",
        "version": recipe.version,
        "base_commit": base,
        "problem_statement": recipe.statement,
        "FAIL_TO_PASS": ["unknown"],
        "PASS_TO_PASS": [],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL_SCRIPT.format(base=base, tests=recipe.tests, patch=test_patch),
        "patch": patch,
    }


def _history(recipe: Recipe, repo: Path) -> tuple[str, str, str]:
    """Make a repository of an unpacked release, at the commit before the fix.

    Returns that commit, the gold patch and the test patch.
    """
    for generated in [*repo.glob("**/*.egg-info"), repo / "PKG-INFO"]:
        shutil.rmtree(generated) if generated.is_dir() else generated.unlink(missing_ok=True)
    (repo / ".gitignore").write_text("__pycache__/\n*.egg-info/\nbuild/\n.pytest_cache/\n")
    source, tests = repo / recipe.file, repo / recipe.tests
    right, full = source.read_text(), tests.read_text()
    if right.count(recipe.right) != 1:
        raise RuntimeError(f"{recipe.instance_id}: {recipe.right!r} is not once in {recipe.file}")
    source.write_text(right.replace(recipe.right, recipe.wrong))
    tests.write_text(_without(full, recipe.hidden))
    _git(repo, "init", "--quiet", "--template=", "--initial-branch=main")
    _git(repo, "add", "README*", ".gitignore")
    _git(repo, "commit", "--quiet", "--message=First commit")
    _git(repo, "add", "--all")
    _git(repo, "commit", "--quiet", "--message=Import")
    base = _git(repo, "rev-parse", "HEAD").strip()
    source.write_text(right)
    patch = _git(repo, "diff", "--", recipe.file)
    tests.write_text(full)
    test_patch = _git(repo, "diff", "--", recipe.tests)
    _git(repo, "commit", "--quiet", "--all", "--message=Fix it, with a test")
    _git(repo, "tag", f"v{recipe.version}")
    _git(repo, "remote", "add", "origin", f"https://example.com/{recipe.package}.git")
    _git(repo, "update-ref", "refs/remotes/origin/main", "HEAD")
    _git(repo, "checkout", "--quiet", "--detach", base)
    return base, patch, test_patch


def _without(source: str, functions: Sequence[str]) -> str:
    """Return the source without these functions, wherever they are defined."""
    lines = source.splitlines(keepends=True)
    defined = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    nodes = [node for node in defined if node.name in functions]
    assert {node.name for node in nodes} == set(functions)
    for node in nodes:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)
    return "".join(lines)


def _git(repo: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in _COMMIT.items()}
    environment = {"PATH": os.environ["PATH"], "HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who}
    done = subprocess.run(["git", *arguments], cwd=repo, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


async def _boot(task: Task) -> Sandbox:
    return await boot_docker(images.Source(task.image, task.base_commit))


async def _results(task: Task, patch: bytes) -> dict[str, str]:
    """Return what each test did with a patch applied, by its name."""
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(task.to_row())
    box = await _boot(task)
    try:
        if patch:
            done = await box.exec(["git", "apply"], env={}, timeout_s=TIMEOUT_S, stdin=patch)
            assert done.returncode == 0, done
        await box.put(f"{box.tmpdir}/eval.sh", spec.eval_script.encode())
        run = await box.exec(["bash", f"{box.tmpdir}/eval.sh"], env={}, timeout_s=TIMEOUT_S)
    finally:
        await box.close()
    return PARSER_REGISTRY[task.log_parser](run.stdout.decode(errors="replace"), spec)


def _debootstrap(engine: ContainerEngine, tag: str, more: Sequence[str]) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SystemExit("task_images: the base image needs root and debootstrap (Debian, Ubuntu: debootstrap)")
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        packages = f"--include={','.join((*PACKAGES, *more))}"
        command = ["debootstrap", "--variant=minbase", packages, SUITE, name, *_mirror()]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"task_images: debootstrap failed: {done.stdout[-500:]}")
        # Every file costs time whenever the engine looks for changes.
        unneeded = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")
        for directory in (*unneeded, "usr/share/zoneinfo/posix", "usr/share/zoneinfo/right"):
            shutil.rmtree(Path(name, directory), ignore_errors=True)
        with subprocess.Popen(["tar", "-C", name, "-c", "."], stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            engine.client.import_image_from_stream(tar.stdout, tag)  # tag included: podman ignores a separate one


def _mirror() -> list[str]:
    """Return the mirror that this machine's apt uses for the suite, for debootstrap; [] if none is known."""
    with contextlib.suppress(OSError):
        command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages"]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
            suite, _, site = line.partition(" ")
            if suite == SUITE and "debian" in site:
                return [site]
    return []


def _pip_download(directory: str, *what: str) -> None:
    # pip reads a source's metadata by its build system: with this Python's setuptools that takes a fifth of the time.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--dest", directory]
    command = [sys.executable, "-m", "pip", "download", *options, *what]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"task_images: {' '.join(what)}: {done.stderr.strip()[-500:]}")


def _build(engine: ContainerEngine, image: str, script: str, tag: str, files: Path, inside: str) -> None:
    """Run a script in an image, with a directory to read from at `inside`, and tag the result."""
    client = engine.client
    mounts = [{"Type": "bind", "Source": str(files), "Target": inside, "ReadOnly": True}]
    host = {"network_mode": "none", "ulimits": engine.ulimits(), "mounts": mounts}
    container = engine.new(image, host, command=["bash", "-euc", script])
    try:
        client.start(container)
        if client.wait(container, timeout=600)["StatusCode"]:
            raise RuntimeError(f"{tag}: {client.logs(container).decode(errors='replace')[-2000:]}")
        client.commit(container, *tag.rsplit(":", 1), changes=UNOWNED)
    finally:
        engine.remove(container)


def _base_key(*more: str) -> str:
    return _key(SUITE, *PACKAGES, *more, *WHEELS, _ACTIVATE)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


async def _make(out: Path) -> None:
    engine = await asyncio.to_thread(get_engine)
    await engine.call(base_image, engine)
    tasks = []
    for recipe in RECIPES:
        tasks.append(await make_task(engine, recipe))
        counts = f"{len(tasks[-1].FAIL_TO_PASS)} fail to pass, {len(tasks[-1].PASS_TO_PASS)} pass to pass"
        print(f"{recipe.instance_id}: {counts}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_tasks(out / "tasks.parquet", tasks)


def main() -> None:
    """Run the command."""
    parser = program.parser("python scripts/task_images.py", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="directory for tasks.parquet")
    what.add_argument("--base", action="store_true", help="make only the base image, for sandbox.base_image")
    what.add_argument("--toolchains", action="store_true", help="make only the base image with other languages' tools")
    options = parser.parse_args()
    try:
        if options.base or options.toolchains:
            print((base_image if options.base else toolchains_image)(get_engine()))
        else:
            asyncio.run(_make(options.out))
    except SandboxError as error:
        raise SystemExit(f"task_images: {error}") from error


if __name__ == "__main__":
    main()
