"""Notebooks as Slurm jobs of their users, for nodes without Docker: Apptainer, or what is installed there."""
