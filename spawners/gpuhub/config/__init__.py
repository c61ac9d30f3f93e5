"""cluster.toml as frozen, validated values: `settings` has the whole, and most tables have a module of their name."""
