"""The directory of a run, its checkpoints, signals, deaths and progress; starting programs; journals of other work."""
