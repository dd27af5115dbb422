"""This package trains: verl's GRPO trainer, with Claude Code episodes as rollouts."""
