"""Tasks in the format of Harbor 1.4: directories with task.toml, instruction.md, environment/, tests/ and solution/.

What a box of ours cannot give is refused with a reason. The fields and their deprecated spellings are those of the
package harbor 0.26.0 (its models of tasks). `rewards.harbor` grades the rows, `rl.data.harbor_images` builds their
images.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from rewards.harbor import MODES, READ, SEPARATE, SHARED, digest, read_tree
from rewards.task import TaskError
from rl.data.fields import Row, RowError, Why, label
from rl.data.source import SourceError

if TYPE_CHECKING:
    from rl.data.sets import ConversionOptions

IMAGES = "claude-code-rl/harbor"
"""The repository of the images of tasks."""

_DEPTH = 6  # directories below the place that is asked for
_TEST_S = 600.0  # Harbor's default
_LARGEST = 1e9  # of any number
_NETWORKS = ("no-network", "public", "allowlist")
_PLAIN = re.compile(r"[^\[\]!\\]+")  # a pattern that means the same to tar and to us
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a variable
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
# A line at the start of an instruction that marks a benchmark's text, for those who clean training data.
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


def rows(place: str, split: str | None) -> Iterator[Row]:
    """Yield a row for each directory that has a task.toml, at most six levels below `place`. Raises SourceError."""
    top, found = Path(place).absolute(), False
    if split is not None:
        raise SourceError(f"{place}: directories have no splits; omit --split")
    for name, below, files in os.walk(top):
        below.sort()
        if "task.toml" in files:
            found = True
            below.clear()
            yield {"instance_id": Path(name).name, "path": name}
        elif len(Path(name).relative_to(top).parts) == _DEPTH:
            below.clear()
    if not found:
        raise SourceError(f"{place}: no directory in it, down to {_DEPTH} levels, has a task.toml")


def convert(row: Row, options: ConversionOptions) -> dict[str, Any]:
    """Convert a task's directory, which is named relative to `options.out`. Raises RowError."""
    directory = Path(row["path"])
    try:
        config = tomllib.loads(_text(directory, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise RowError(Why.INVALID, f"task.toml: {error}") from error
    schema = str(config.get("schema_version", config.get("version", "1.4")))
    if schema.split(".")[0] not in ("0", "1"):
        raise RowError(Why.UNSUPPORTED, f"schema_version is {schema}; 1.4 is known")
    names = ("environment", "agent", "verifier", "solution")
    environment, agent, verifier, solution = (_table(config, name) for name in names)
    _migrate(environment)
    if not isinstance(workdir := environment.get("workdir", "/"), str) or not workdir.startswith("/"):
        raise RowError(Why.INVALID, f"workdir is {workdir!r}")
    whole = _Part(directory, config, agent, verifier)
    parts = _steps(whole) or [whole]
    for part in dict.fromkeys((whole.place, *(one.place for one in parts))):
        about = next((one for one in parts if one.place == part), whole)
        if reason := _unsupported(part, about.config, environment, about.agent, about.verifier):
            raise RowError(Why.UNSUPPORTED, reason)
    if not all(any((at / "tests" / "test.sh").is_file() for at in (one.place, directory)) for one in parts):
        raise RowError(Why.NO_RECIPE, "there is no tests/test.sh")
    modes = [_mode(part.verifier) for part in parts]
    dropped = [_dropped(directory, *one, environment) for one in zip(parts, modes, strict=True)]
    network = next(filter(None, (_network(environment, one.agent, one.verifier) for one in parts)), "")
    if network and not options.without_network:
        raise RowError(
            Why.UNSUPPORTED,
            f"{network}, and boxes have no network; --without-network converts it all the same, and admission tells "
            "whether it can be solved so",
        )
    statements = [_instruction(_text(part.place, "instruction.md")) for part in parts]
    if not all(statement.strip() for statement in statements):
        raise RowError(Why.NO_STATEMENT)
    about = _table(config, "task")
    name = about.get("name") or directory.name
    if not isinstance(name, str):
        raise RowError(Why.INVALID, f"[task] name is {name!r}")
    try:
        files = {part: read_tree(directory / part) for part in READ}
        image = image_name(directory, environment)
    except TaskError as error:
        raise RowError(Why.UNSUPPORTED, str(error)) from error
    limits = {key: _number(environment, old) for key, old in _LIMITS.items()}
    graded = [_graded(part, directory) | {"drop": drop} for part, drop in zip(parts, dropped, strict=True)]
    if stepped := parts[0] is not whole:
        for step, part, statement in zip(graded, parts, statements, strict=True):
            step |= {"name": part.place.name, "statement": statement, "min_reward": _least(part.config, options.reward)}
        strategy = config.get("multi_step_reward_strategy") or "mean"
        if strategy not in ("mean", "final"):
            raise RowError(Why.INVALID, f"multi_step_reward_strategy is {strategy!r}")
        steps = {"steps": graded, "strategy": strategy, "solution": all(step["solution"] for step in graded)}
    return {
        "instance_id": name.replace("/", "__"),
        "repo": name,
        "version": label(about.get("version")) or "",
        "problem_statement": "\n\n".join(statements),
        "image": image,
        "difficulty": label(_table(config, "metadata").get("difficulty")),
        "grader": "harbor",
        "grading": {
            "directory": os.path.relpath(directory.resolve(), options.out.resolve()),
            "sha256": digest(files),
            "mode": SEPARATE if stepped else modes[0],
            "reward": options.reward,
            "threshold": options.threshold,
            **graded[0],
            **(steps if stepped else {}),
            "solution_env": _variables(solution, "solution"),
            "environment": {
                "docker_image": environment.get("docker_image"),
                "workdir": environment.get("workdir"),
                "env": _variables(environment, "environment"),
                "build_timeout_s": _number(environment, "build_timeout_sec") or _TEST_S,
            },
            "limits": {key: value for key, value in limits.items() if value},
            "network": network and f"{network}; the boxes have none",
        },
    }


class _Part(NamedTuple):
    """A part of a task is a step of it, or the whole: its directory, its table, and what holds for agent and tests."""

    place: Path
    config: Row
    agent: dict[str, Any]
    verifier: dict[str, Any]


def _steps(whole: _Part) -> list[_Part]:
    """Return the steps of a task, which have the task's settings and their own over them. Raises RowError."""
    parts: list[_Part] = []
    given = whole.config.get("steps") or []
    for step in given if isinstance(given, list) else [given]:
        name = step.get("name") if isinstance(step, dict) else None
        if not isinstance(name, str) or not name.isprintable() or "/" in name or name.strip(". ") != name or not name:
            raise RowError(Why.INVALID, f"[[steps]] name is {name!r}")
        place = whole.place / "steps" / name
        if (place / "workdir").exists():
            raise RowError(Why.UNSUPPORTED, f"steps/{name}/workdir: nothing is put into the box between two steps")
        agent, verifier = (_table(step, one) for one in ("agent", "verifier"))
        env = {**_table(whole.verifier, "env"), **_table(verifier, "env")}
        artifacts = [one for table in (whole.config, step) for one in _listed(table.get("artifacts"))]
        tables = {**whole.agent, **agent}, {**whole.verifier, **verifier, "env": env}
        parts.append(_Part(place, {**step, "artifacts": artifacts}, *tables))
    if len({part.place.name.casefold() for part in parts}) < len(parts):
        raise RowError(Why.INVALID, "two [[steps]] have the same name")
    return parts


def _least(step: Row, reward: str) -> float | None:
    """Return the reward from which the next step is played. Raises RowError."""
    given = step.get("min_reward")
    wanted = given if isinstance(given, dict) else {} if given is None else {"reward": given}
    if others := [key for key in wanted if key != reward]:
        raise RowError(Why.UNSUPPORTED, f"min_reward of {others[0]!r}, but the reward that counts is {reward!r}")
    return _number(wanted, reward) if wanted.get(reward) else None


def _graded(part: _Part, directory: Path) -> dict[str, Any]:
    """Return what the grader is told of a part alone. directory: the task's. Raises RowError."""
    own = part.place / "solution"
    return {
        "timeout_s": _number(part.verifier, "timeout_sec") or _TEST_S,
        "agent_timeout_s": _number(part.agent, "timeout_sec"),
        "env": _variables(part.verifier, "verifier"),
        "solution": ((own if own.is_dir() else directory / "solution") / "solve.sh").is_file(),
    }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


# What a box gets at least (`rl.episodes.boxes`), by our names.
_LIMITS = {"cpus": "cpus", "memory_mb": "memory_mb", "disk_mb": "storage_mb"}


def image_name(directory: Path, environment: Mapping[str, Any]) -> str:
    """Return the name of a task's image, with a hash of all that it is made of. Raises RowError, TaskError."""
    given = environment.get("docker_image")
    if given is not None and not (isinstance(given, str) and given.strip() and given.isprintable()):
        raise RowError(Why.INVALID, f"docker_image is {given!r}")
    context = directory / "environment"
    if not given and not (context / "Dockerfile").is_file():
        raise RowError(Why.NO_IMAGE, "there is neither docker_image nor environment/Dockerfile")
    whole = hashlib.sha256(repr((given, environment.get("workdir"), environment.get("env") or None)).encode())
    for path, data in ({} if given else read_tree(context)).items():
        runs = os.access(context / path, os.X_OK)
        whole.update(json.dumps([path, runs, hashlib.sha256(data).hexdigest()]).encode())
    short = re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).strip("-")[:60]
    return f"{IMAGES}:{short or 'task'}-{whole.hexdigest()[:16]}"


def _unsupported(
    directory: Path, config: Row, environment: Row, agent: Mapping[str, Any], verifier: Mapping[str, Any]
) -> str:
    """Return what a task wants that our boxes or episodes do not have, "" if there is nothing."""
    system = str(environment.get("os") or "linux").lower()
    compose = [name for name in _COMPOSE if (directory / "environment" / name).exists()]
    ignores = sorted(path.name for part in READ for path in (directory / part).rglob(".harborignore"))
    wants = {
        f"[environment] os = {system!r}": system != "linux",
        "GPUs": environment.get("gpus"),
        "a TPU": environment.get("tpu"),
        "MCP servers": environment.get("mcp_servers"),
        "skills_dir: the agent is not given a task's skills": environment.get("skills_dir"),
        "a healthcheck: nothing runs in a box before the agent": environment.get("healthcheck")
        or config.get("healthcheck"),
        f"services: environment/{''.join(compose[:1])}": compose,
        "[verifier] collect": verifier.get("collect"),
        "[agent] user: all programs have the image's user": agent.get("user") is not None,
        "[verifier] user: all programs have the image's user": verifier.get("user") is not None,
        "trajectory.json: the agent begins without a history": (directory / "trajectory.json").exists(),
        "a .harborignore": ignores,
    }
    return next((what for what, wanted in wants.items() if wanted), "")


def _mode(verifier: Row) -> str:
    given, own = verifier.get("environment_mode"), verifier.get("environment")
    mode = given or (SHARED if own is None else SEPARATE)
    if mode not in MODES or (mode == SHARED and own is not None):
        raise RowError(Why.INVALID, f"[verifier] environment_mode is {given!r}")
    return mode


def _dropped(directory: Path, part: _Part, mode: str, environment: Row) -> list[str]:
    """Return which files of a patch a part's verifier does not get, as patterns for `rewards.rules`.

    A separate one gets the artifacts, which are in the work tree. What they exclude has no anchor, as in tar. Raises
    RowError if such a part cannot be graded by the diff of the work tree.
    """
    if mode == SHARED:
        return []
    own, tests = _table(part.verifier, "environment"), {part.place / "tests", directory / "tests"}
    if own.get("docker_image") or any((at / name).exists() for at in tests for name in ("Dockerfile", *_COMPOSE)):
        raise RowError(
            Why.UNSUPPORTED,
            "the verifier has an image of its own, and a patch is graded in a fresh box of the agent's image",
        )
    workdir = environment.get("workdir")
    if not workdir and (directory / "environment" / "Dockerfile").is_file():
        said = re.findall(r"^\s*WORKDIR\s+(\S+)", _text(directory, "environment/Dockerfile"), re.MULTILINE | re.I)
        workdir = PurePosixPath("/", *said).as_posix() if said else None
    if not (artifacts := _listed(part.config.get("artifacts"))):
        why = "a separate verifier without artifacts, which in Harbor sees nothing of what the agent has made"
        raise RowError(Why.UNSUPPORTED, why)
    patterns = ["*"]
    for one in artifacts:
        about = one if isinstance(one, dict) else {"source": one}
        source, exclude = about.get("source"), _listed(about.get("exclude"))
        if about.get("service") not in (None, "main") or not all(map(_PLAIN.fullmatch, map(str, [source, *exclude]))):
            raise RowError(Why.UNSUPPORTED, f"the artifact {one!r}")
        path = PurePosixPath(workdir or "/", str(source))
        if not workdir or not path.is_relative_to(workdir) or ".." in path.parts:
            why = f"the artifact {source} is not in the work tree, and the verifier's box gets nothing but a patch"
            raise RowError(Why.UNSUPPORTED, why)
        own = "" if path == PurePosixPath(workdir) else f"/{path.relative_to(workdir)}"
        patterns += [f"!{own or '*'}", *(f"{own}/**/{str(pattern).removeprefix('./')}" for pattern in exclude)]
    return [] if patterns == ["*", "!*"] else patterns


def _network(environment: Row, agent: Row, verifier: Row) -> str:
    """Return who wants a network, "" if nobody does. Raises RowError."""
    baseline = environment.get("network_mode", "public")
    own = _table(verifier, "environment")
    _migrate(own)
    modes = {
        "the agent": agent.get("network_mode") or baseline,
        "the verifier": verifier.get("network_mode") or own.get("network_mode") or baseline,
    }
    for mode in modes.values():
        if mode not in _NETWORKS:
            raise RowError(Why.INVALID, f"network_mode is {mode!r}; it must be one of {', '.join(_NETWORKS)}")
    wanting = [f"{who} has network_mode {mode!r}" for who, mode in modes.items() if mode != "no-network"]
    return " and ".join(wanting)


def _migrate(environment: dict[str, Any]) -> None:
    """Replace the deprecated spellings of an [environment]. Raises RowError."""
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if isinstance(value := environment.pop(old, None), str):
            parts = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([GMK])\s*", value.upper())
            if not parts:
                raise RowError(Why.INVALID, f"{old} is {value!r}; it must be like 2G or 512M")
            size = int(float(parts[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[parts[2]])
            if environment.setdefault(new, size) != size:
                raise RowError(Why.INVALID, f"{old} and {new} are not the same")
    internet = environment.pop("allow_internet", None)
    if internet is not None and "network_mode" not in environment and environment.get("allowed_hosts") is None:
        environment["network_mode"] = "public" if internet else "no-network"


def _instruction(text: str) -> str:
    """Return an instruction without the canary lines at its start, which no agent should see."""
    lines = text.split("\n")
    first = next((n for n, line in enumerate(lines) if not _CANARY.fullmatch(line.strip())), len(lines))
    return "\n".join(lines[first:]).lstrip("\n") if first else text


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise RowError(Why.INVALID, f"{name} is no table")
    return dict(value or {})


def _number(table: Row, name: str) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise RowError(Why.INVALID, f"{name} is {value!r}")
    return value


def _variables(table: Row, where: str) -> dict[str, str]:
    found = _table(table, "env")
    for name, value in found.items():
        if not isinstance(value, str):
            raise RowError(Why.INVALID, f"[{where}.env] {name} is {value!r}")
        if not _NAME.fullmatch(name) or "\0" in value or (where == "environment" and not value.isprintable()):
            raise RowError(Why.INVALID, f"[{where}.env] {name!r}: an image cannot have it")
        if "${" in value:
            raise RowError(Why.UNSUPPORTED, f"[{where}.env] {name}: a variable of the machine is not given to boxes")
    return found


def _text(directory: Path, name: str) -> str:
    if (directory / name).is_symlink():
        raise RowError(Why.UNSUPPORTED, f"{name} is a link")
    try:
        return (directory / name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(Why.INVALID, f"{name}: {error}") from error
