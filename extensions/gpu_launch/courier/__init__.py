"""Reads and writes files in a user's home and opens terminals for the broker: `gpu-launch-courier`.

It runs as the user in one of the user's containers, started by the broker through the node's Docker daemon, so it has
only the user's own access. It needs the standard library alone.
"""

from __future__ import annotations

from gpu_launch.courier.main import main

__all__ = ["main"]
