"""The Slurm scheduling backend: a lease is a Slurm job."""
