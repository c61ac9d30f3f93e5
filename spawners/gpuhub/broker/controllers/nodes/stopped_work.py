"""The end of the work that `gpuhub down` has stopped, at the broker's next start."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from gpuhub.broker.db.stopped_nodes import read_stopped_nodes
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.domain.reconcile import ObservedNode

log = logging.getLogger(__name__)


async def end_stopped_work(core: BrokerState, file: Path) -> None:
    """End the leases and workers of the nodes in the file, and remove it; called before anything is started there.

    Raises:
        SetupError: The file is damaged.
        OSError: The file cannot be removed. It would be wrong for a later start.
    """
    for node, daemon_id in read_stopped_nodes(file).items():
        observed_node = ObservedNode(
            node=node,
            identity=(daemon_id, None),
            containers=(),
            observed_at=core.clock.now(),
            has_stopped=daemon_id is None,
        )
        await core.ledger.change(mutations.end_stopped_work(observed_node))
        # Again: the end of a job releases its lease after the edit.
        await core.ledger.change(mutations.prove_stopped(observed_node))
        log.info("node %s: nothing runs there since `gpuhub down`; its leases have ended", node)
    await asyncio.to_thread(file.unlink, missing_ok=True)
