"""See what the policy does: a local, read-only web page over runs' records. docs/records.md describes it."""
