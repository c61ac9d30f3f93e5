"""The running product of the benchmarks: a separate instance for each group."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.config import settings

ROOT = Path(__file__).parents[2]
INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")


@dataclass(frozen=True)
class Product:
    """A running instance."""

    paths: Paths
    cluster: settings.ClusterSettings
    address: str
    password: str


def make(target: str, *variables: str) -> None:
    """Run a make target with this instance; its output goes to standard error."""
    command = ["make", "--no-print-directory", target, f"INSTANCE={INSTANCE}", *variables]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, stderr=sys.stderr)


@contextmanager
def running(engine: str = "builtin") -> Iterator[Product]:
    """Run the instance with a backend, and take it down at the end."""
    make("up", f"ENGINE={engine}")
    paths = Paths(INSTANCE)
    cluster = settings.load(paths.closet_cluster_file)
    try:
        yield Product(
            paths=paths,
            cluster=cluster,
            address=f"http://127.0.0.1:{cluster.hub.port}",
            password=secrets.read_secret(paths, secrets.USER_PASSWORD),
        )
    finally:
        make("down")


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median ratio of pairs measured one after the other, so that a slow minute affects both."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def print_progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)
