"""Processes of a worker container: the engine with its launch agent, and the ranks below it."""
