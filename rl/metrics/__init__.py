"""This package measures a run and shows it to people: episode metrics, panels, samples and the load of the GPUs."""
