"""This package plays episodes: a real agent works on a task in a sandbox, and its calls are kept as exact tokens."""

# The model names that an agent sends with its calls, and by which the proxy tells a side call from one to the policy.
POLICY_MODEL = "policy"
SIDE_MODEL = "policy-side"
