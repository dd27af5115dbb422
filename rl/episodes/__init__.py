"""What episodes are made of, from a config: agents, rules, policies, and boxes of each kind."""
