"""The Docker Swarm of the nodes, used for overlay networks only: which nodes are in it, and which of them manage it."""
