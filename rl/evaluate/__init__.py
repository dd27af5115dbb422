"""Evaluate a policy or an endpoint on a set of tasks. docs/evaluation.md"""
