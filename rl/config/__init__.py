"""This room composes configs from groups, checks names in them, and reads command lines and plug-ins."""
