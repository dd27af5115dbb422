"""The quickstart is a complete run that is small enough for a laptop CPU: generated tasks, 0.6M parameters."""
