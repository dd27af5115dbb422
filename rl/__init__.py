"""Training with verl's GRPO trainer, whose rollouts are Claude Code episodes, and the programs around it.

docs/architecture.md, "Layout", says what each room is for.
"""
