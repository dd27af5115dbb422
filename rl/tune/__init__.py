"""This package fine-tunes on what episodes have recorded: rows, verl's trainer, adapters."""
