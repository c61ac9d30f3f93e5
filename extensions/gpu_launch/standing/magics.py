"""`%gpu_ranks` and `%%gpu_ranks`: parse, call, show."""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class

from gpu_launch import exchange
from gpu_launch.magics import cell_text, check_syntax, labels, variables
from gpu_launch.standing import said, words
from gpu_launch.standing.words import Words

if TYPE_CHECKING:
    from gpu_launch.standing.cell import Cell
    from gpu_launch.standing.group import Group

#: The environment when the extension was loaded: what differs later was set by the user, for the ranks too.
_BEFORE = dict(os.environ)


@magics_class
class GpuRanksMagics(Magics):
    """The magics."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._group: Group | None = None
        atexit.register(self._abandon)

    @line_cell_magic
    def gpu_ranks(self, line: str, cell: str | None = None) -> None:
        """Run this cell on every rank of a process group that stands from cell to cell."""
        asked = words.parse(line, cell=cell is not None)
        if asked.help:
            sys.stdout.write(words.USAGE)
        elif asked.stop:
            self._stop()
        elif cell is not None:
            built = self._cell(asked, line, cell)
            self.shell.user_ns.update(self._ensure(asked).run(built))
        elif asked.launch or asked.restart:
            self._ensure(asked)
        else:
            sys.stdout.write(said.NOTHING_STANDS if self._group is None else self._group.describe())

    def _ensure(self, asked: Words) -> Group:
        """The ranks that stand; started where there are none, or others are wanted."""
        from gpu_launch.standing.group import Group

        group = self._group
        if group is not None and not asked.restart:
            if group.stands:
                words.check_same(group.words, asked.launch)
            if group.stands or not asked.launch:
                return group
        flags = group.words if group is not None and not asked.launch else asked.launch
        # Refused, where it is, before the ranks that stand are ended.
        new = Group(flags, before=_BEFORE)
        self._end()
        new.start()
        self._group = new
        return new

    def _cell(self, asked: Words, line: str, cell: str) -> Cell:
        """Everything that can be refused before a rank is asked."""
        from gpu_launch.standing.cell import Cell

        text = cell_text(self.shell, line, cell)
        check_syntax(cell, text)
        given = exchange.build(send=variables(asked.options.send, self.shell.user_ns), labels=labels(self.shell))
        files = {} if given is None else given.files
        sources = json.loads(files[exchange.SOURCES])["sources"] if exchange.SOURCES in files else {}
        return Cell(
            text=text,
            body=cell,
            ranks=asked.ranks,
            send=files.get(exchange.SEND),
            sources=sources,
            returns=asked.options.returns,
        )

    def _stop(self) -> None:
        nodes = self._end()
        sys.stdout.write(f"gpu_launch: the ranks on {nodes} have ended\n" if nodes else said.NOTHING_STANDS)

    def _end(self) -> str:
        group, self._group = self._group, None
        return "" if group is None else group.stop()

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.abandon()


# `%gpu_ranks?` shows it.
GpuRanksMagics.gpu_ranks.__doc__ = f"{GpuRanksMagics.gpu_ranks.__doc__}\n\n{words.USAGE}"
