"""A crew's ipyparallel controller, which ends when the kernel that started it is gone, with all that it started."""

from __future__ import annotations

import os
import signal
import threading
import time

from gpu_launch.ranks import native

_POLL_S = 0.5  # seconds between looks at the parent


def main() -> None:
    """ipcontroller's main, watched."""
    parent = os.getppid()
    # Its schedulers are forks of it, which it ends on SIGTERM; but not on one that comes before it listens to it.
    forking: list[int] = []
    os.register_at_fork(
        before=lambda: forking.append(os.getpid()),
        after_in_parent=forking.clear,
        after_in_child=lambda: native.die_with_parent(signal.SIGKILL, forking[-1]),
    )
    threading.Thread(target=_watch, args=(parent,), name="kernel watch", daemon=True).start()
    from ipyparallel.controller.app import main as run_controller

    run_controller()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
