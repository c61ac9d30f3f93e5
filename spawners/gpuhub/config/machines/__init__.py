"""Tables of cluster.toml about machines: nodes and guests, their power, network and storage."""
