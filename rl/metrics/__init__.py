"""What a run measures, and how people see it: episode metrics, panels, samples, GPU load."""
