"""`gpuhub slurm`: a Slurm for machines that have none, and the same accounts on all of them."""
