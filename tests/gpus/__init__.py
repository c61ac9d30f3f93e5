"""The product on machines with real GPUs: `make test-gpu CLUSTER=cluster.toml`."""
