"""The broker's HTTP API as its clients see it: wire models, client, errors."""
