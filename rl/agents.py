"""Install the programs of other agents than Claude Code, or say which there are. docs/agents.md

    python -m rl.agents                     # the agents, their versions, and what is installed
    python -m rl.agents install codex ...   # from npm's and PyPI's registries, into the user's cache

Exit status: 0 done, 1 a program cannot be had, 2 an agent is not known.
"""

from __future__ import annotations

from rl.episodes.setup import INSTALLED
from rollout import program


def main() -> int:
    """Install programs, or list them."""
    parser = program.parser("python -m rl.agents", __doc__)
    parser.add_argument("words", nargs="*", metavar="install NAME", help="nothing, or install and names of agents")
    words = parser.parse_args().words
    programs = {agent.PROGRAM.name: agent.PROGRAM for agent in INSTALLED if agent.PROGRAM}
    if not words:
        for name, one in programs.items():
            print(f"{name:<16} {one.version:<10} {one.directory if one.directory.is_dir() else 'not installed'}")
        return 0
    if words[0] != "install" or len(words) == 1 or (unknown := [name for name in words[1:] if name not in programs]):
        said = f"there is no agent {unknown[0]}" if words[0] == "install" and len(words) > 1 else "say install NAME ..."
        return program.failed(f"agents: {said}; there are {', '.join(programs)}", 2)
    for name in words[1:]:
        try:
            if not programs[name].directory.is_dir():
                programs[name].install()
        except (OSError, RuntimeError) as error:
            return program.failed(f"agents: {name} cannot be installed: {error}")
        print(f"{name} {programs[name].version} is in {programs[name].directory}")
    return 0


if __name__ == "__main__":
    program.end(main)
