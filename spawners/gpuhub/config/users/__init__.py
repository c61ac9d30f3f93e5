"""Tables of cluster.toml about people: users, groups and their login; users' identities on files."""
