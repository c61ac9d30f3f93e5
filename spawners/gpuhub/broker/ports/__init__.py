"""Servers of users' jobs, reached through the hub by their owners and the users whom these name."""
