"""A node's ipyparallel engine: imports while it waits for the connection file, then serves.

`python -m gpu_launch.engine_process RUN_FOLDER`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from gpu_launch import environment
from gpu_launch.ranks import native, server
from gpu_launch.runs import RunFolder

#: How long the controller's connection file may take.
CONNECTION_S = 120.0
_POLL_S = 0.02  # seconds


def main() -> None:
    """Run the engine until its controller is gone or it is told to stop."""
    run = RunFolder(root=Path(sys.argv[1]), preemptions=environment.read().preemptions)
    settings = json.loads(run.settings.read_text())
    # A worker that was killed takes its engine along.
    native.die_with_parent(signal.SIGKILL, os.getppid())
    # First, as its import of torch takes longest.
    forkserver = server.spawn(run.run_id) if settings["is_launch"] else None
    from ipyparallel.engine.app import IPEngine

    from gpu_launch import agent, network

    class Engine(IPEngine):  # type: ignore[misc]
        """An engine that ends after its ranks."""

        def init_signal(self) -> None:
            super().init_signal()
            if settings["is_launch"]:
                signal.signal(signal.SIGTERM, lambda _number, _frame: agent.leave(run.run_id))

    if forkserver is not None:
        agent.adopt(forkserver, run.run_id)
    # A worker container's network is connected right after its start.
    network.own(environment.read().subnet)
    wait_for(run.connection)
    Engine.launch_instance(argv=build_arguments(run, settings))


def build_arguments(run: RunFolder, settings: dict[str, object]) -> list[str]:
    """The engine's arguments."""
    profile = run.profile if settings["is_launch"] else settings["profile_dir"]
    return [
        f"--file={run.connection}",
        f"--profile-dir={profile}",
        # Generous, as all nodes' engines and torch imports may share few cores.
        "--timeout=30",
        f"--IPEngine.max_heartbeat_misses={settings['heartbeat_misses']}",
        f"--IPEngine.enable_nanny={not settings['is_launch']}",
    ]


def wait_for(path: Path) -> None:
    """Wait for a file on a shared home; TimeoutError after CONNECTION_S.

    Listing the folder, rather than looking for the one name, makes an NFS client ask the server again.
    """
    deadline = time.monotonic() + CONNECTION_S
    while not any(entry.name == path.name for entry in path.parent.iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {CONNECTION_S:.0f} s")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
