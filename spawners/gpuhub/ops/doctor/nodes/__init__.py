"""Checks of the nodes: their GPUs, disks, network and clocks, and the queries for the facts about them."""
