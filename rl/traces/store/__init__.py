"""This package puts episodes into a LightningStore of agentlightning (docs/traces.md).

It reads the records of a run, finished or not, and asks the store what it has already. Nothing here runs inside the
processes that play episodes.
"""
