"""Fine-tuning on chosen episodes, once or in rounds (docs/fine-tuning.md)."""
