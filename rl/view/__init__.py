"""See what the policy does: a local, read-only web page over runs' records. docs/view.md describes it."""
