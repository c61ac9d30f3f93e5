"""The file of stopped nodes: what `gpuhub down` has seen to be gone, for the broker's next start.

It is written only while no broker runs, and removed by the next one before that starts anything: so nothing can have
been started on a node between what the file says and its use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gpuhub.broker.db.store import lock_path
from gpuhub.common.errors import SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths, acquire_lock

#: Node → the id of the Docker daemon that listed no container of the instance; None where every process of the node
#: has ended, which no daemon has to confirm.
StoppedNodes = dict[str, str | None]
_FORMAT = TypeAdapter(StoppedNodes)


@contextmanager
def keep_broker_stopped(paths: Paths) -> Iterator[None]:
    """Keep brokers from starting.

    Raises:
        SetupError: A broker runs.
    """
    lock = acquire_lock(lock_path(paths.store), "a broker runs")
    try:
        yield
    finally:
        os.close(lock)


def record_stopped_nodes(paths: Paths, stopped: StoppedNodes) -> None:
    """Add nodes to the file; the caller keeps brokers from starting since before it queried the nodes."""
    if not stopped:
        return
    merged = {**read_stopped_nodes(paths.stopped_nodes), **stopped}
    replace_file(paths.stopped_nodes, _FORMAT.dump_json(merged))


def read_stopped_nodes(file: Path) -> StoppedNodes:
    """Return the nodes in the file; none if it does not exist.

    Raises:
        SetupError: It is not as it was written.
    """
    try:
        return _FORMAT.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        raise SetupError(
            f"{file} is damaged ({error.errors()[0]['msg']}): remove it; leases of stopped nodes may then be "
            "quarantined, and `gpuhub lease force` frees their GPUs"
        ) from None
