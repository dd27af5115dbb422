"""The quickstart is a complete run that is small enough for a laptop CPU: generated tasks, a policy of 1 M weights."""
