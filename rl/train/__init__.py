"""Where verl meets us: the trainer, the agent loop, groups, the engine, the curriculum, distillation."""
