"""A small cluster for the hub's tests."""

from __future__ import annotations

from gpuhub.config.settings import ClusterSettings

CARDS = {"rig1": ("RTX 5090", "32607M"), "rig2": ("RTX 5070", "12227M"), "rig3": ("RTX 5060", "8151M")}


def build_cluster(**changes: object) -> ClusterSettings:
    """Build settings with three nodes of one GPU each, and a profile for each GPU."""
    tables: dict[str, object] = {
        "nodes": [
            {
                "name": name,
                "address": f"192.168.1.{20 + number}",
                "docker": f"unix:///run/{name}.sock",
                "gpus": [{"model": model, "memory": memory}],
            }
            for number, (name, (model, memory)) in enumerate(CARDS.items(), 1)
        ],
        "profiles": [
            {"name": "big", "title": "RTX 5090", "gpu_model": "RTX 5090", "time_limit": "8h"},
            {"name": "small", "title": "RTX 5070", "gpu_model": "RTX 5070", "cpus": 1, "memory": "4G", "shm": "1G"},
            {"name": "cpu", "title": "No GPU", "gpu_count": 0},
        ],
        "users": {"allowed": ["ada", "ben"]},
        "storage": {"home": "/srv/home/{username}", "datasets": "/srv/datasets"},
        "hub": {"address": "192.168.1.20"},
        **changes,
    }
    return ClusterSettings.model_validate(tables)
