"""Teachers: other models answer recorded states, which gives preference pairs and data to distil (docs/ingest.md)."""
