"""Agents, rules, policies and boxes of each kind: the parts of an episode, made from a config."""
