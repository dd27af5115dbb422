"""Make states from recorded conversations of coding agents, and data from states (docs/traces.md)."""
