"""Checks of a Slurm site and of its daemons on the nodes, and the queries for the facts about them."""
