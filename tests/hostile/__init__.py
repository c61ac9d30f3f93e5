"""Attacks from inside a user's container on the running product: what must be refused, and that all others work on."""
