"""A node's worker: supervises one engine and ends every process below it.

It is the main process of a worker container (`gpu-launch-worker`), and a child of the kernel in the notebook's
container.
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

from gpu_launch import environment
from gpu_launch.common import processes, run_folder
from gpu_launch.worker.engine_process import wait_for_file
from gpu_launch.worker.forkserver import linux

_POLL_S = 0.05  # seconds between polls of the engine
_GRACE_S = 2.0  # seconds for the engine of a user's own ipyparallel cluster to end


def main() -> None:
    """Run the console script `gpu-launch-worker`."""
    env = environment.read()
    if env.run_id is None:
        sys.exit("gpu-launch-worker is started by gpuhub: GPU_LAUNCH_RUN is not set.")
    run = run_folder.open_run(env.home, env.run_id)
    sys.exit(_run_engine(run, env))


def _run_engine(run: run_folder.RunFolder, env: environment.Environment) -> int:
    wait_for_file(run.settings)
    parent = os.getppid()
    settings = json.loads(run.settings.read_text())
    is_launch = settings["is_launch"]
    # In a detached job the first worker has the role of a notebook.
    leads = settings.get("detached", False) and env.worker == 0
    run.logs.mkdir(exist_ok=True)
    return supervise(
        [sys.executable, "-m", f"gpu_launch.{'detached.driver' if leads else 'worker.engine_process'}", str(run.root)],
        mark=processes.build_mark(run.run_id, env.worker),
        grace_s=_choose_grace_s(env, is_launch=is_launch, is_detached=settings.get("detached", False)),
        log=run.log_file("notebook" if env.worker is None else f"worker-{env.worker}"),
        # In the notebook's container no other process would notice that the kernel died.
        should_run=(lambda: os.getppid() == parent) if env.worker is None else (lambda: True),
    )


def _choose_grace_s(env: environment.Environment, *, is_launch: bool, is_detached: bool) -> float | None:
    """Return the seconds from SIGTERM to the engine's end, None for no limit."""
    if not is_launch:
        return _GRACE_S
    if is_detached:
        # Slurm may send SIGTERM to every process of the job at once, including the driver's own worker.
        return None
    # A worker's ranks may be writing a checkpoint, and the broker kills the container at the time limit. The launch
    # itself sends SIGTERM to the notebook's own ranks and waits for them: when this process ends, they have no work to
    # save.
    return 0.0 if env.worker is None else None


def supervise(
    arguments: list[str], *, mark: str, log: Path, grace_s: float | None, should_run: Callable[[], bool]
) -> int:
    """Run the engine until it ends, SIGTERM comes or `should_run` returns False; return its exit code.

    The engine gets the SIGTERM too and then has `grace_s` seconds, None for no limit. No rank survives this call.
    """
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    # Processes that ranks leave behind become children of this one, even if they are daemons.
    linux.adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook handles Ctrl-C in a terminal
    try:
        with log.open("ab") as output:
            engine = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        while (code := engine.poll()) is None and not stopping and should_run():
            _reap_orphans(engine.pid)
            time.sleep(_POLL_S)
        if code is None:
            code = _terminate_engine(engine, grace_s)
        return code if code >= 0 else 128 - code
    finally:
        processes.kill_marked(mark)
        processes.kill_descendants()


def _reap_orphans(engine: int) -> None:
    """Reap ended processes, but not the engine: its Popen object needs the exit status."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == engine:
                return
            os.waitpid(ended.si_pid, 0)


def _terminate_engine(engine: subprocess.Popen[bytes], grace_s: float | None) -> int:
    engine.terminate()
    try:
        return engine.wait(grace_s)
    except subprocess.TimeoutExpired:
        engine.kill()
        return engine.wait()


if __name__ == "__main__":
    main()
