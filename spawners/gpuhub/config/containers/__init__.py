"""Tables of cluster.toml about what runs on the nodes: notebooks, jobs, services, and their images."""
