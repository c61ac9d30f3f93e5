"""Which GPUs the broker has read, before the first user comes."""

from __future__ import annotations

import time

import httpx

from gpuhub import gpus
from gpuhub.errors import SetupError
from gpuhub.head import secrets
from gpuhub.paths import Paths


def wait_for_cards(cluster_url: str, paths: Paths, deadline_s: float) -> dict[str, list[gpus.Card]]:
    """Each node's cards, once every node's GPUs have been read.

    Raises:
        SetupError: a node has not been read in time; says what the broker says of it.
    """
    headers = {"Authorization": f"token {secrets.read_secret(paths, secrets.SPAWNER_TOKEN)}"}
    end = time.monotonic() + deadline_s
    waiting = "the broker has not answered"
    while time.monotonic() < end:
        ...
    raise SetupError(f"the GPUs of every node could not be read within {deadline_s:.0f} s: {waiting}")
