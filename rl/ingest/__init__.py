"""This package makes states of recorded conversations of coding agents, and data of states (docs/ingest.md)."""
