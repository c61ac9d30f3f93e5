"""Times uses of `%%gpu` in a kernel without a notebook, and prints them as one line of JSON, in seconds: first and later.

It is copied to a notebook's container and needs only gpu_launch.
"""

from __future__ import annotations

import json
import sys
import time

from IPython.core.interactiveshell import InteractiveShell

MARK = "SECONDS "
CELL = "%%gpu --model '{model}'\ntotal = sum(values)\nvalues.append(total)\nprint('in the cell')"


def main() -> None:
    """Run the cell as often as the second argument says, on a GPU of the first argument's model."""
    model, uses = sys.argv[1], int(sys.argv[2])
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpu_launch")
    shell.run_cell("values = list(range(1000))", store_history=True)
    seconds = []
    for _ in range(uses):
        began = time.monotonic()
        shell.run_cell(CELL.format(model=model), store_history=True).raise_error()
        seconds.append(time.monotonic() - began)
    assert len(shell.user_ns["values"]) == 1000 + uses
    print(MARK + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
