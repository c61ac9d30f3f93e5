"""The workers of launches: their containers, the pools that wait for the next launch, and calls to their agents."""
