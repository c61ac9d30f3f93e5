"""A node's worker: keeps one engine and sees that nothing outlives it.

The main process of a worker container (`gpu-launch-worker`); in the notebook's own container a child of the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from gpu_launch import environment, processes, runs
from gpu_launch.engine_process import wait_for
from gpu_launch.ranks import native

_POLL_S = 0.05  # seconds between looks at the engine
_GRACE_S = 2.0  # seconds a user's own engine has to end by itself


def main() -> None:
    """Console script `gpu-launch-worker`."""
    env = environment.read()
    if env.run_id is None:
        sys.exit("gpu-launch-worker is started by gpuhub: GPU_LAUNCH_RUN is not set.")
    run = runs.folder(env.home, env.run_id)
    sys.exit(_serve(run, env))


def _serve(run: runs.RunFolder, env: environment.Environment) -> int:
    wait_for(run.settings)
    parent = os.getppid()
    settings = json.loads(run.settings.read_text())
    is_launch = settings["is_launch"]
    # A detached job leads itself: the first worker has the part of a notebook.
    leads = settings.get("detached", False) and env.worker == 0
    run.logs.mkdir(exist_ok=True)
    return supervise(
        [sys.executable, "-m", f"gpu_launch.{'detached.driver' if leads else 'engine_process'}", str(run.root)],
        mark=processes.mark(run.run_id, env.worker),
        grace_s=_grace(env, is_launch=is_launch, is_detached=settings.get("detached", False)),
        log=run.log("notebook" if env.worker is None else f"worker-{env.worker}"),
        # In the notebook's container nobody else would notice that the kernel died.
        is_wanted=(lambda: os.getppid() == parent) if env.worker is None else (lambda: True),
    )


def _grace(env: environment.Environment, *, is_launch: bool, is_detached: bool) -> float | None:
    """Seconds from SIGTERM to the engine's end; None for as long as it takes."""
    if not is_launch:
        return _GRACE_S
    if is_detached:
        # Under Slurm every process of the job may get its SIGTERM at once, the driver's own worker among them.
        return None
    # A worker's ranks may be writing a checkpoint, and the broker kills the container when their time is over. The
    # notebook's own ranks get their SIGTERM, and their time, from the launch: when this ends nothing is to be saved.
    return 0.0 if env.worker is None else None


def supervise(
    arguments: list[str], *, mark: str, log: Path, grace_s: float | None, is_wanted: Callable[[], bool]
) -> int:
    """Run the engine until it ends, SIGTERM comes or `is_wanted` says no; its exit code. Leaves no rank behind.

    From SIGTERM on, which it gets as well, the engine has `grace_s` seconds; None for no limit.
    """
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    # What ranks leave behind becomes ours, whatever it did to get away.
    native.adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in a terminal is the notebook's to handle
    try:
        with log.open("ab") as output:
            engine = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        while (code := engine.poll()) is None and not stopping and is_wanted():
            _reap_orphans(engine.pid)
            time.sleep(_POLL_S)
        if code is None:
            code = _end(engine, grace_s)
        return code if code >= 0 else 128 - code
    finally:
        processes.kill_marked(mark)
        processes.kill_descendants()


def _reap_orphans(engine: int) -> None:
    """Wait for what has ended, but not for the engine: its end is somebody else's to see."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == engine:
                return
            os.waitpid(ended.si_pid, 0)


def _end(engine: subprocess.Popen[bytes], grace_s: float | None) -> int:
    engine.terminate()
    try:
        return engine.wait(grace_s)
    except subprocess.TimeoutExpired:
        engine.kill()
        return engine.wait()


if __name__ == "__main__":
    main()
