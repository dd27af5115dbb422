"""Episodes: a real agent (Claude Code) on one task in a sandbox, its calls to the model recorded as exact tokens."""

# The model names that an agent sends with its calls, and by which the proxy tells a side call from one to the policy.
POLICY_MODEL = "policy"
SIDE_MODEL = "policy-side"
