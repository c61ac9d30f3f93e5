"""The broker's metrics for Prometheus: nodes, GPUs, leases, the queue, jobs and the broker itself."""
