"""Configs, composed from groups, with their overrides, command lines and plug-ins."""
