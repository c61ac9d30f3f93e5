"""GpuSlurmSpawner: notebooks as Slurm jobs, on nodes without Docker."""
