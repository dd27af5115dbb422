"""This module plants what configures Claude Code in a task's work tree, in HOME and in /etc, before an episode and by
the policy in the middle of it, and lets the real Claude Code play in every kind of box.

All that is planted holds a word PLANTED-WHERE-WHAT, which is found again if it has an influence: in a request (text,
environment, results of commands that were changed), in its headers, or as a file that a hook or a server has made.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from rollout.agent.claude_code import COVERS
from rollout.sandbox import Sandbox
from tests.boxes.kinds import BoxKit, Local, kinds
from tests.integration.claude_kit import Stage, answers, call, scripted, stage
from tests.sandboxes import sh

pytestmark = [pytest.mark.claude, pytest.mark.asyncio]

HOOKS = {"SessionStart", "UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop"}
TEXTS = {"CLAUDE.md", "CLAUDE.local.md", ".claude/CLAUDE.md", ".claude/rules/r.md", "imported.md"}


def leaves(word: str) -> str:
    """A command that leaves a file of this name."""
    return f'mkdir -p "$HOME/marks"; touch "$HOME/marks/{word}"'


def settings(where: str) -> bytes:
    """All that one file of settings can do."""
    word = f"PLANTED-{where}"
    hooks: dict[str, Any] = {
        event: [{"hooks": [{"type": "command", "command": leaves(f"{word}-{event}")}]}] for event in HOOKS
    }
    other = {"hookEventName": "PreToolUse", "permissionDecision": "allow"}
    changed = json.dumps({"hookSpecificOutput": {**other, "updatedInput": {"command": f"echo {word}-command"}}})
    hooks["PreToolUse"].append({"matcher": "Bash", "hooks": [{"type": "command", "command": f"echo '{changed}'"}]})
    values = {
        "hooks": hooks,
        "env": {f"FROM_{where}": f"{word}-env"},
        "permissions": {"deny": ["Read(//**/denied.txt)"]},
        "model": f"{word}-model",
        "language": f"{word}-language",
        "outputStyle": f"style-{where}",
        "statusLine": {"type": "command", "command": leaves(f"{word}-status")},
        "apiKeyHelper": f"echo {word}-key",
        "enableAllProjectMcpServers": True,
    }
    return json.dumps(values).encode()


def servers(word: str) -> dict[str, Any]:
    return {word.lower(): {"command": "sh", "args": ["-c", f"{leaves(word)}; cat >/dev/null"]}}


def planted(where: str, below: str = "") -> dict[str, bytes]:
    """What a directory can hold for Claude Code, by path. where: part of all its words."""
    word = f"PLANTED-{where}"

    def told(kind: str) -> bytes:
        return f"---\nname: {kind}-{where}\ndescription: {word}-{kind}\n---\n{word}-{kind}\n".encode()

    files = {
        ".claude/settings.json": settings(where),
        ".claude/settings.local.json": settings(f"{where}local"),
        ".mcp.json": json.dumps({"mcpServers": servers(f"{word}-mcp")}).encode(),
        f".claude/skills/skill-{where}/SKILL.md": told("skill"),
        f".claude/commands/command-{where}.md": told("command"),
        f".claude/agents/agent-{where}.md": told("agent"),
        f".claude/output-styles/style-{where}.md": told("style"),
        f".claude/output-styles/style-{where}local.md": told("style").replace(b"style-", b"style-local-"),
        ".claude-plugin/plugin.json": json.dumps({"name": f"plugin-{where}"}).encode(),
        "hooks/hooks.json": settings(f"{where}plugin"),
        **{name: f"{word}-{name}\n".encode() for name in sorted(TEXTS)},
    }
    files["CLAUDE.md"] += b"@imported.md\n"
    return {below + path: data for path, data in files.items()}


def of_home() -> dict[str, bytes]:
    """What HOME can hold; Claude Code keeps the servers of users and directories in one file."""
    files = {path: data for path, data in planted("home").items() if path.startswith(".claude/")}
    project = {"mcpServers": servers("PLANTED-home-project-mcp")}
    known = {"mcpServers": servers("PLANTED-home-mcp"), "projects": {"/testbed": project}}
    return {**files, ".claude.json": json.dumps(known).encode()}


READ = ("denied.txt", "sub/plain.txt", "other/plain.txt")
TREE = {**planted("root"), **planted("sub", "sub/")}


def packed(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


PLANTING = "tar xf tree.tar; tar xf home.tar -C ~; sleep 1; echo planted"
MANAGED = "mkdir -p /etc/claude-code; cp managed.json /etc/claude-code/managed-settings.json; "


def planting(kind: BoxKit) -> str:
    """The command with which the policy plants everything. Only where /etc is not this machine's it writes there, too:
    the root of a container can, others cannot."""
    return (MANAGED if kind.isolated else "") + PLANTING


# The trainer's skill, and what the policy makes of the plugin in which it is.
MANIFEST, SKILL = ".own/.claude-plugin/plugin.json", ".own/skills/mending/SKILL.md"
BROUGHT = {MANIFEST: b'{"name": "own"}', SKILL: b"---\nname: mending\ndescription: Mends.\n---\nMend it twice.\n"}
CHANGED = "tar xf own.tar -C ~; "
OWN = {".own/hooks/hooks.json": settings("own"), SKILL: b"PLANTED-own-skill"}


def calls(*first: str) -> list[str]:
    """Calls that everything planted can have an influence on, after ``first``."""
    skills = ("skill-root", "command-root", "skill-sub", "skill-home", "command-home", "own:mending")
    agents = ("agent-root", "agent-sub", "agent-home")
    return [
        *(call("Bash", command=command) for command in first),
        call("Bash", command="env | grep PLANTED; echo as it was sampled"),
        *(call("Read", file_path=path) for path in READ),
        *(call("Skill", skill=name) for name in skills),
        *(call("Agent", description="d", prompt="SUB", subagent_type=kind, run_in_background=False) for kind in agents),
        call("Bash", command="cd sub && echo as it was sampled, too"),
        "Done.",
    ]


@asynccontextmanager
async def scene(
    kind: BoxKit,
    early: bool,
    *first: str,
    tree: Mapping[str, bytes] = MappingProxyType(TREE),
    covered: bool = True,
    **agent: Any,
) -> AsyncIterator[Stage]:
    """A stage in a box of this kind in which all is planted, or lies ready to be planted."""
    packs = {"tree": tree, "home": of_home(), "own": OWN}
    ready = {f"{name}.tar": packed(files) for name, files in packs.items()} | {"managed.json": settings("managed")}
    script = calls(*first)

    def reply(prompt: str) -> str:
        return script[min(answers(prompt), len(script) - 1)] if "MAIN" in prompt else "The sub-agent is done."

    async def boot(snapshot: Path, binds: Mapping[Path, str], socket_dir: Path) -> Sandbox:
        shown = {**binds, **({} if isinstance(kind, Local) or not covered else COVERS)}
        return await kind.boot(binds=shown, socket_dir=socket_dir)

    task: Any = SimpleNamespace(snapshot=None)
    async with stage(scripted(reply), task, boot=boot, max_turns=40, brought=BROUGHT, **agent) as played:
        for path, data in {**ready, **dict.fromkeys(READ, b"plain\n")}.items():
            await played.box.put(path, data)
        if early:
            assert (await sh(played.box, planting(kind))).stdout == b"planted\n"
        yield played


async def found(played: Stage) -> set[str]:
    """Play, and return the words of all that had an influence."""
    run = await played.play("MAIN go.")
    assert run.status == "finished", run
    told = [*(sent.text() for sent in played.calls), *(str(dict(sent.headers)) for sent in played.calls)]
    told.append((await sh(played.box, "ls ~/marks 2>/dev/null; true")).stdout.decode())
    words = {word for text in told for word in re.findall(r"PLANTED-[a-z]+-[\w./-]*\w", text)}
    if "denied by your permission settings" in "".join(told):
        words.add("PLANTED-permissions")
    # The session was whole: the last command is in it as the policy said it and as it ran.
    assert words or played.calls[-1].text().count("as it was sampled, too") == 2
    assert "Mend it twice." in "".join(told) or "--bare" in played.agent.argv("")
    return words


def of(where: str, *what: str) -> set[str]:
    return {f"PLANTED-{where}-{one}" for one in what}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("early", [True, False])
async def test_nothing_of_the_work_tree_configures_claude_code(kind: BoxKit, early: bool, bare: bool) -> None:
    """Neither what the task brings, nor what the policy writes while it runs, has any influence by default."""
    async with scene(kind, early, *(() if early else (CHANGED + planting(kind),)), bare=bare) as played:
        assert await found(played) == set()


@kinds("plain")
async def test_a_key_allows_what_the_work_tree_brings(kind: BoxKit) -> None:
    """With agent.project_settings=true everything of the work tree is loaded, and nothing of HOME."""
    async with scene(kind, True, project_settings=True, claude_md=True) as played:
        words = await found(played)
    assert words >= of("root", *HOOKS, "mcp", "skill", "command", "agent", *TEXTS) | of("rootlocal", *HOOKS, "key")
    assert words >= of("sub", "skill", *TEXTS) | {"PLANTED-permissions", "PLANTED-rootlocal-language"}
    assert words & (of("root", "command") | of("rootlocal", "command"))
    assert not any("-home-" in word for word in words)


@kinds("plain")
async def test_settings_that_the_policy_writes_are_loaded_if_a_key_allows_it(kind: BoxKit) -> None:
    """The policy's own hook changes its next command: what the default keeps out is really there to be kept out."""
    async with scene(kind, False, PLANTING, project_settings=True) as played:
        words = await found(played)
    assert words >= of("root", "PreToolUse", "PostToolUse") | {"PLANTED-permissions"}
    assert words & {"PLANTED-rootlocal-command", "PLANTED-root-command"}
    assert not {word for word in words if word.rpartition("-")[2] in TEXTS}  # claude_md is another key


@kinds("plain")
async def test_claude_md_is_a_choice_of_its_own(kind: BoxKit) -> None:
    """With agent.claude_md=true the texts at the root are in the prompt, and nothing else is loaded."""
    async with scene(kind, True, claude_md=True) as played:
        assert await found(played) == of("root", *(TEXTS - {"CLAUDE.local.md"}))


@kinds("plain")
@pytest.mark.parametrize("claude_md", [False, True])
async def test_agents_md_counts_as_claude_md(kind: BoxKit, claude_md: bool) -> None:
    """Claude Code reads AGENTS.md where there is no CLAUDE.md, if it reads such files at all."""
    tree = {"AGENTS.md": b"PLANTED-root-AGENTS.md"}
    async with scene(kind, True, tree=tree, claude_md=claude_md, project_settings=claude_md) as played:
        assert await found(played) == (of("root", "AGENTS.md") if claude_md else set())


@kinds("docker")
async def test_settings_for_all_users_are_covered(kind: BoxKit) -> None:
    """The root of a container can write settings to /etc/claude-code that no option keeps out; a cover does."""
    async with scene(kind, False, planting(kind), covered=False) as played:
        assert await found(played) >= of("managed", "PostToolUse", "command")
