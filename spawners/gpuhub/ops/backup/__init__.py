"""Copies of the whole state of the head node, and their restoration."""
