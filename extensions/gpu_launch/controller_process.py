"""A crew's ipyparallel controller, which ends when the kernel that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

_POLL_S = 0.5  # seconds between looks at the parent


def main() -> None:
    """ipcontroller's main, watched."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="kernel watch", daemon=True).start()
    from ipyparallel.controller.app import main as run_controller

    run_controller()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
