"""The page of all GPUs: what it shows, its live updates, and its actions."""
