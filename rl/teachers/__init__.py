"""Teachers: other models that answer recorded states, and write bugs and problem statements for tasks.

Answers become preference pairs and data to distil (docs/traces.md); docs/data.md tells of the tasks.
"""
