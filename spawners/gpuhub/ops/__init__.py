"""Operating a cluster: deployment, images, provisioning of nodes, guests, Slurm, diagnosis and validation."""
