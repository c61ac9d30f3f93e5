"""Adding a machine to the cluster, and taking one out of it."""
