"""Sandboxes made by apptainer or SingularityCE, without a container engine and without root."""
