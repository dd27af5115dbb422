"""This package makes sandboxes by apptainer or SingularityCE, without a container engine and without root."""
