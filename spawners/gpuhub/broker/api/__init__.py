"""The broker's HTTP API: routes, authentication, limits."""
