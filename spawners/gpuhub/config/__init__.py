"""cluster.toml as frozen, validated values."""
