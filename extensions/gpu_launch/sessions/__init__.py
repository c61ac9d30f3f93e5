"""Rank sessions: ranks that keep running between `%%gpu_ranks` cells."""
