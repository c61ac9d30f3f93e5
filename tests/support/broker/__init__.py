"""A real broker for tests, calls of its API, and prepared rows and wire models."""
