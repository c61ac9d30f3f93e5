"""What clients see of leases, jobs, nodes and the cluster, and explanations why requests wait."""
