"""The proxy is an Anthropic Messages server in front of an engine; it keeps what was sampled, token by token."""
