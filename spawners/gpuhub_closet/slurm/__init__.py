"""The practice closet's Slurm: its files, and its daemons."""
