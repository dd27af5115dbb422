"""Ingest: recorded conversations of coding agents as states, and what is made of states (docs/ingest.md)."""
