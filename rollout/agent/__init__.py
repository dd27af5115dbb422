"""The agent: Claude Code as a process inside a sandbox."""
