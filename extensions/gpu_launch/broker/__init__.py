"""The client of the broker's API, and values for it."""
