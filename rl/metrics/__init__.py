"""A run's metrics, measured and shown to people: episodes, steps, loggers, panels, samples, GPU utilization."""
