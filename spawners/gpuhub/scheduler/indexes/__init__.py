"""Indexes of the nodes that make decisions cheap: what is free, where a demand fits now, and when it will fit."""
