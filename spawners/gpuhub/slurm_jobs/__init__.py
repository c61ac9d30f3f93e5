"""Scripts and programs of Slurm jobs on nodes without Docker, for notebooks and workers."""
