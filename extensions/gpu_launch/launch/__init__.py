"""A launch: from its plan through the worker group to its end."""
