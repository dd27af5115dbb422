"""A policy, tasks and an agent loop small enough to run the whole trainer in a test."""
