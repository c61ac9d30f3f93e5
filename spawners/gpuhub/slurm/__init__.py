"""Slurm as the engine: what is asked of it, what it says, and what a site must have. Values and one way to ask."""
