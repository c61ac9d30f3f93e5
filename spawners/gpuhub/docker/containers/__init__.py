"""Containers on the nodes: their specs, confinement and lifecycle; users' containers, and those of gpuhub itself."""
