"""Ranks that stay: `%%gpu_ranks` runs a cell on every rank of a process group that stands from cell to cell."""
