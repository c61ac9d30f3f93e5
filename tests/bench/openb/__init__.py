"""Placement and queueing on a real cluster's trace, OpenB, or on a small generated one of the same shape."""
