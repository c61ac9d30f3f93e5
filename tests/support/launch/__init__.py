"""Whole launches on this machine: workers, agents, ranks and detached jobs over loopback."""
