"""`%gpu_launch` and `%%gpu_launch`: parse, call, show."""

from __future__ import annotations

import os
import sys

from IPython.core.magic import Magics, line_cell_magic, magics_class

from gpu_launch import options

#: The environment when the extension was loaded: what differs later was set by the user, for the ranks too.
_BEFORE = dict(os.environ)


@magics_class
class GpuLaunchMagics(Magics):
    """The magics."""

    @line_cell_magic
    def gpu_launch(self, line: str, cell: str | None = None) -> None:
        """Run a script or this cell with torchrun over several nodes' GPUs. `%gpu_launch --help` lists the flags."""
        wanted = options.parse(line, cell=cell is not None)
        if wanted.help:
            sys.stdout.write(options.USAGE)
            return
        from gpu_launch.launch import launch

        launch(wanted, cell=cell, before=_BEFORE)
