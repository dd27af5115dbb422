"""Anthropic Messages server in front of a token engine; keeps what was sampled, token by token."""
