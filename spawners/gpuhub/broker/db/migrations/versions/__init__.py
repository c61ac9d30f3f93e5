"""One module a step of the store's history."""
