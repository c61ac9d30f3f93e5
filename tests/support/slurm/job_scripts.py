"""Settings and hostile texts for the tests of the scripts inside Slurm jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_jobs import scripts

ON_NODE = Path(scripts.__file__).with_name("node_main.py")


#: Each has an effect if a shell parses it.
HOSTILE = (
    "a'b",
    'a"b',
    "$(touch {made})",
    "`touch {made}`",
    "a\ntouch {made}\n",
    "; touch {made} #",
    "'; touch {made}; '",
)


def cluster(
    home: str = "/srv/home/{username}",
    datasets: str | None = "/srv/data",
    models: str | None = None,
    **slurm: Any,
) -> ClusterSettings:
    settings = {
        "engine": "slurm",
        "nodes": [
            {"name": "rig1", "slurm": "sx1", "address": "10.0.0.11", "docker": "ssh://rig1"},
            {"name": "rig2", "address": "fd00::12", "docker": "ssh://rig2"},
        ],
        "profiles": [{"name": "gpu", "title": "One GPU"}],
        "users": {"allowed": ["ada"]},
        "slurm": slurm,
    }
    made = ClusterSettings.model_validate(settings)
    # Values that the settings refuse are tested too.
    storage = made.storage.model_copy(update={"home": home, "datasets": datasets, "models": models})
    return made.model_copy(update={"storage": storage})


PLAIN = {"runtime": "plain", "command": "/opt/gpuhub/bin/jupyterhub-singleuser"}


APPTAINER = {"runtime": "apptainer", "image": "/srv/images/notebook.sif"}
