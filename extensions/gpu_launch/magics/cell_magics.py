"""The magics that run a cell elsewhere: `%%gpu_ranks` on all ranks of a session, `%%gpu` on a GPU taken for it."""

from __future__ import annotations

import atexit
import json
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class

from gpu_launch.common import exchange
from gpu_launch.errors import UsageError
from gpu_launch.magics import notebook
from gpu_launch.options import gpu_cell, rank_session
from gpu_launch.options.gpu_cell import GpuCellOptions
from gpu_launch.options.rank_session import RankSessionOptions

if TYPE_CHECKING:
    from gpu_launch.sessions.cell import CellRequest
    from gpu_launch.sessions.gpu_cell import GpuCellManager
    from gpu_launch.sessions.session_manager import SessionManager


@magics_class
class GpuRanksMagics(Magics):
    """`%gpu_ranks` and `%%gpu_ranks`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._group: SessionManager | None = None
        atexit.register(self._abandon)

    @property
    def session(self) -> SessionManager | None:
        """The ranks that wait for cells; None without any."""
        return self._group

    @line_cell_magic
    def gpu_ranks(self, line: str, cell: str | None = None) -> None:
        """Run this cell on every rank of a process group that stays from cell to cell."""
        asked = rank_session.parse(line, cell=cell is not None)
        if asked.help:
            sys.stdout.write(rank_session.USAGE)
        elif asked.stop:
            self._stop()
        elif cell is not None:
            built = self._cell(asked, line, cell)
            self.shell.user_ns.update(self._ensure(asked).run_cell(built))
        elif asked.has_start_flags or asked.restart:
            self._ensure(asked)
        else:
            sys.stdout.write(rank_session.NO_SESSION if self._group is None else self._group.describe())

    def _ensure(self, asked: RankSessionOptions) -> SessionManager:
        """Return the running ranks, after starting them where there are none or others are requested."""
        from gpu_launch.sessions.session_manager import SessionManager

        group = self._group
        if group is not None and not asked.restart:
            if group.is_active:
                rank_session.check_same(group.options, asked)
            if group.is_active or not asked.has_start_flags:
                return group
        options = group.options if group is not None and not asked.has_start_flags else asked.start
        # A refusal must come before the running ranks are ended.
        new = SessionManager(options, before=notebook.BEFORE)
        self._end()
        new.start()
        self._group = new
        return new

    def _cell(self, asked: RankSessionOptions, line: str, cell: str) -> CellRequest:
        """Return the checked request, before any rank is involved."""
        from gpu_launch.sessions.cell import CellRequest

        text = notebook.cell_text(self.shell, line, cell)
        notebook.check_syntax(cell, text)
        exchange_files = exchange.build_exchange(
            send=notebook.variables(asked.options.send, self.shell.user_ns), labels=notebook.labels(self.shell)
        )
        files = {} if exchange_files is None else exchange_files.files
        sources = json.loads(files[exchange.SOURCES])["sources"] if exchange.SOURCES in files else {}
        return CellRequest(
            source=text,
            body=cell,
            ranks=asked.ranks,
            send=files.get(exchange.SEND),
            sources=sources,
            returns=asked.options.returns,
        )

    def _stop(self) -> None:
        nodes = self._end()
        sys.stdout.write(f"gpu_launch: the ranks on {nodes} have ended\n" if nodes else rank_session.NO_SESSION)

    def _end(self) -> str:
        group, self._group = self._group, None
        return "" if group is None else group.stop()

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.abandon()


@magics_class
class GpuCellMagics(Magics):
    """`%gpu` and `%%gpu`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._worker: GpuCellManager | None = None
        atexit.register(self._abandon)

    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> None:
        """Run this cell on a GPU that is taken for it, with the notebook's variables."""
        asked = gpu_cell.parse(line, cell=cell is not None)
        if asked.help:
            sys.stdout.write(gpu_cell.USAGE)
        elif asked.stop:
            nodes = self._end()
            sys.stdout.write(f"gpu_launch: {nodes} is released\n" if nodes else gpu_cell.NO_WORKER)
        elif cell is None:
            sys.stdout.write(gpu_cell.NO_WORKER if self._worker is None else self._worker.describe())
        else:
            # The checks come before a GPU is taken.
            request = self._build_request(asked, line, cell)
            self._choose_worker(asked).run_cell(request)

    def _build_request(self, asked: GpuCellOptions, line: str, cell: str) -> CellRequest:
        from gpu_launch.sessions import cell_names
        from gpu_launch.sessions.cell import CellRequest

        text = notebook.cell_text(self.shell, line, cell)
        notebook.check_syntax(cell, text)
        namespace, hidden = self.shell.user_ns, self.shell.user_ns_hidden
        sent = notebook.variables(asked.options.send, namespace)
        used = cell_names.select_variables(cell_names.find_used_names(cell).union(sent), hidden)
        names = cell_names.find_all_names(used, namespace)
        return CellRequest(
            source=text,
            body=cell,
            variables={
                "names": sorted(names),
                # What is not in the notebook may be on the worker alone.
                "named": sorted(names | used | cell_names.select_variables(cell_names.find_bound_names(cell), hidden)),
                "wanted": list(asked.options.returns),
                "submodules": cell_names.find_submodules(cell, namespace),
                "imports": cell_names.find_imports(cell),
            },
        )

    def _choose_worker(self, asked: GpuCellOptions) -> GpuCellManager:
        """Return the worker that is there; with other options a new one, after releasing that."""
        from gpu_launch.sessions.gpu_cell import GpuCellManager

        worker = self._worker
        if worker is not None and asked.fits(worker.options):
            return worker
        if worker is not None and worker.is_active and worker.kept:
            raise UsageError(
                f"The GPU that is there does not fit these flags, and {', '.join(worker.kept)} would be gone with it. "
                "Leave the flags out to use it, or release it with %gpu --stop."
            )
        # A refusal must come before the worker is ended.
        new = GpuCellManager(
            asked.start, before=notebook.BEFORE, namespace=self.shell.user_ns, label=notebook.labels(self.shell)
        )
        self._end()
        self._worker = new
        return new

    def _end(self) -> str:
        worker, self._worker = self._worker, None
        return "" if worker is None else worker.stop()

    def _abandon(self) -> None:
        if self._worker is not None:
            self._worker.abandon()


# `%gpu?` and `%gpu_ranks?` show these.
GpuCellMagics.gpu.__doc__ = f"{GpuCellMagics.gpu.__doc__}\n\n{gpu_cell.USAGE}"
GpuRanksMagics.gpu_ranks.__doc__ = f"{GpuRanksMagics.gpu_ranks.__doc__}\n\n{rank_session.USAGE}"
