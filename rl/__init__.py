"""The trainer side: verl's GRPO trainer with Claude Code episodes as rollouts."""
