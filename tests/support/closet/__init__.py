"""The practice closet in tests: its nodes, faults, machines with SSH, and what runs on its daemons."""
