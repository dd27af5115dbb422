"""What a config needs of a cluster, by calculation: the parts of ``rl.plan``."""
