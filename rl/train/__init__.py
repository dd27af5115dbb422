"""The places where verl meets us: trainer, agent loop, groups, engine, curriculum, distillation."""
