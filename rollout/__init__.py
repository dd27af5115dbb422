"""Play episodes: a real agent works on a task in a sandbox, and its calls are kept as exact tokens."""

# The model names that an agent sends with its calls, and by which the proxy tells a side call from one to the policy.
POLICY_MODEL = "policy"
SIDE_MODEL = "policy-side"


def storable(value: object, most: int = 64) -> bool:
    """Tell whether a record can hold what an agent or a model has said: MessagePack has no integers of more than 64
    bits, and code that walks a value takes only so many levels of lists and objects (``most``; Claude Code's own events
    have about ten)."""
    level = [value]
    for _ in range(most):
        inner = [one for one in level if isinstance(one, dict | list)]
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return True
        if any(isinstance(part, int) and not -(1 << 63) <= part < 1 << 64 for part in level):
            return False
    return False
