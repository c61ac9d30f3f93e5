"""What `gpuhub bench` measured: kept in a file, shown with the nodes, and read by users' predictions."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError

from gpuhub.broker.operations.admin import require_admin
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.common.errors import InvalidRequest, NotFound
from gpuhub.common.files import replace_file
from gpuhub.domain.models import Identity

log = logging.getLogger(__name__)


class BenchOperations:
    """Keeps the last bench.

    Args:
        file: Where it is kept; None for memory alone.
    """

    def __init__(self, core: BrokerState, file: Path | None) -> None:
        self._core, self._file = core, file
        self._bench: BenchView | None = None
        if file is not None and file.exists():
            self._load(file)

    def _load(self, file: Path) -> None:
        try:
            self._set(BenchView.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as error:
            log.warning("The figures in %s cannot be read, `gpuhub bench` measures them again: %s", file, error)

    def get(self) -> BenchView:
        """Return the last bench.

        Raises:
            NotFound: Nothing was measured yet.
        """
        if self._bench is None:
            raise NotFound("nothing was measured yet: an administrator does so with `gpuhub bench`")
        return self._bench

    async def save(self, caller: Identity, bench: BenchView) -> BenchView:
        """Keep a bench in place of the last one.

        Raises:
            NotAllowed: The caller is not an administrator.
            InvalidRequest: It names a node that the cluster does not have.
        """
        require_admin(caller, "say what their nodes' GPUs and network are capable of")
        nodes = self._core.capacity.inventory.nodes
        unknown = sorted({card.node for card in bench.cards} - nodes.keys())
        if unknown:
            raise InvalidRequest(f"there is no node {unknown[0]!r}; there are: {', '.join(nodes)}")
        if self._file is not None:
            await asyncio.to_thread(replace_file, self._file, bench.model_dump_json(indent=1), mode=0o644)
        self._set(bench)
        return bench

    def _set(self, bench: BenchView) -> None:
        self._bench = bench
        self._core.capacity.bench = bench.list_nodes()
