"""A client for Slurm: its commands and its REST API, with jobs, nodes and sites as values."""
