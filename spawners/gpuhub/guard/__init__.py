"""The packet filter on every node for users' containers: `rules` says what it does, `container` keeps it there."""
