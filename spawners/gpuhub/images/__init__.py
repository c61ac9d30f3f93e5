"""The images, and how they get to the nodes without a registry: built on one daemon, streamed to the others."""
