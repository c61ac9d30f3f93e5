"""Reads and writes files in a user's home, and gives a terminal in a worker, for the broker: `gpu-launch-courier`.

It runs as the user in a container of the user's, started by the broker through the node's Docker daemon, so that it can
reach nothing that the user could not. Standard library only.
"""

from __future__ import annotations

from gpu_launch.courier.command import main

__all__ = ["main"]
