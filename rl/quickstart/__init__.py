"""A complete run small enough for a laptop CPU: generated tasks for a policy of a few million weights."""
