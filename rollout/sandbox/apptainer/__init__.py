"""Sandboxes by apptainer or SingularityCE: no engine, no root."""
