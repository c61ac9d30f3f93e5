"""A node's ipyparallel engine: imports its modules while it waits for the connection file, then serves.

`python -m gpu_launch.worker.engine_process RUN_FOLDER`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from gpu_launch import environment
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.worker.forkserver import client, linux

#: Longest wait for the controller's connection file, seconds.
CONNECTION_TIMEOUT_S = 120.0
_POLL_S = 0.02  # seconds


def main() -> None:
    """Run the engine until its controller is gone or SIGTERM comes."""
    run = RunFolder(root=Path(sys.argv[1]), preemptions=environment.read().preemptions)
    settings = json.loads(run.settings.read_text())
    # The engine must not outlive a worker that was killed.
    linux.die_with_parent(signal.SIGKILL, os.getppid())
    # The fork server starts first because its import of torch takes longest.
    forkserver = client.start_fork_server(run.run_id) if settings["is_launch"] else None
    from ipyparallel.engine.app import IPEngine

    from gpu_launch.common import network
    from gpu_launch.worker import agent

    class Engine(IPEngine):  # type: ignore[misc]
        """An engine that ends after its ranks."""

        def init_signal(self) -> None:
            super().init_signal()
            if settings["is_launch"]:
                signal.signal(signal.SIGTERM, lambda _number, _frame: agent.shut_down(run.run_id))

    if forkserver is not None:
        agent.adopt_fork_server(forkserver, run.run_id)
    # A worker container's network is connected shortly after its start.
    network.find_own_interface(environment.read().subnet)
    wait_for_file(run.connection)
    Engine.launch_instance(argv=build_arguments(run, settings))


def build_arguments(run: RunFolder, settings: dict[str, object]) -> list[str]:
    profile = run.profile if settings["is_launch"] else settings["profile_dir"]
    return [
        f"--file={run.connection}",
        f"--profile-dir={profile}",
        # Generous, because the engines and torch imports of all nodes may share few cores.
        "--timeout=30",
        f"--IPEngine.max_heartbeat_misses={settings['heartbeat_misses']}",
        f"--IPEngine.enable_nanny={not settings['is_launch']}",
    ]


def wait_for_file(path: Path) -> None:
    """Wait for a file on a shared home.

    Listing the folder, instead of testing for the one name, makes an NFS client ask the server again.

    Raises:
        TimeoutError: The file did not appear within CONNECTION_TIMEOUT_S.
    """
    deadline = time.monotonic() + CONNECTION_TIMEOUT_S
    while not any(entry.name == path.name for entry in path.parent.iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {CONNECTION_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
