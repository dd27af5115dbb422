"""Supervised fine-tuning on what episodes have recorded: rows, verl's trainer, adapters."""
