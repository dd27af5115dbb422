"""Send the episodes of a run to a LightningStore of agentlightning (docs/traces.md).

The records of a run, finished or not, are read, and the store is asked what it has already. Nothing here runs inside
the processes that play episodes.
"""
