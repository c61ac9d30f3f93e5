"""Slurm for tests: scripted in memory, and real daemons on this machine."""
