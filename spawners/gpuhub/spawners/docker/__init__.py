"""GpuDockerSpawner: notebooks as containers on the nodes."""
