"""Instances: the user's notebook servers, started and used from a laptop without a browser."""
