"""From a patch to a verdict: tasks, hidden tests in a fresh box, and what they say."""
