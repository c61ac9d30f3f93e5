"""A node's worker: supervises one ipyparallel engine and ends every process below it.

It is the main process of a worker container (`gpu-launch-worker`), and a child of the kernel in the notebook's
container. The engine is a child of it: `python -m gpu_launch.worker.main RUN_FOLDER`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from gpu_launch import environment
from gpu_launch.common import service_gateway
from gpu_launch.common.run_folder import RunFolder, open_run
from gpu_launch.common.shared_models import start_linking
from gpu_launch.worker import processes, rank_stacks
from gpu_launch.worker.forkserver import client

_ENGINE_POLL_S = 0.05  # seconds between polls of the engine
_GRACE_S = 2.0  # seconds for the engine of a user's own ipyparallel cluster to end
_FILE_TIMEOUT_S = 120.0  # longest wait for the settings and for the controller's connection file, seconds
_FILE_POLL_S = 0.02  # seconds


def main() -> None:
    """Run the console script `gpu-launch-worker`."""
    env = environment.read()
    if env.run_id is None:
        sys.exit("gpu-launch-worker is started by gpuhub: GPU_LAUNCH_RUN is not set.")
    start_linking(os.environ, env.home)
    if env.worker is not None:
        # In a notebook's container its server has one.
        service_gateway.start_in_thread(env)
        os.environ.pop("GPUHUB_JOB_KEY", None)
    run = open_run(env.home, env.run_id)
    sys.exit(_run_worker(run, env))


def _run_worker(run: RunFolder, env: environment.Environment) -> int:
    _wait_for_file(run.settings)
    parent = os.getppid()
    settings = json.loads(run.settings.read_text())
    is_launch = settings["is_launch"]
    # In a detached job the first worker has the role of a notebook.
    leads = settings.get("detached", False) and env.worker == 0
    run.logs.mkdir(exist_ok=True)
    python = settings.get("python") or sys.executable
    if not os.access(python, os.X_OK):
        sys.exit(f"{python}, the interpreter of the notebook that started this, is not here: is the home mounted?")
    return supervise(
        [python, "-m", f"gpu_launch.{'detached.driver' if leads else 'worker.main'}", str(run.root)],
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
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook handles Ctrl-C in a terminal
    try:
        with log.open("ab") as output:
            engine = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        while (code := engine.poll()) is None and not stopping and should_run():
            _reap_orphans(engine.pid)
            time.sleep(_ENGINE_POLL_S)
        if code is None:
            code = _terminate_engine(engine, grace_s)
        return code if code >= 0 else 128 - code
    finally:
        processes.kill_marked(mark)
        processes.kill_descendants()
        rank_stacks.remove_left_folders()


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


def run_engine(folder: Path) -> None:
    """Run the engine until its controller is gone or SIGTERM comes.

    It imports its modules while it waits for the connection file.
    """
    run = RunFolder(root=folder, earlier_starts=environment.read().earlier_starts)
    settings = json.loads(run.settings.read_text())
    # The engine must not outlive a worker that was killed.
    processes.die_with_parent(signal.SIGKILL, os.getppid())
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
    # A worker container's networks are connected shortly after its start.
    network.find_own_interface(environment.read().subnet)
    network.find_own_interface(environment.read().rank_subnet)
    _wait_for_file(run.connection)
    Engine.launch_instance(argv=_build_engine_arguments(run, settings))


def _build_engine_arguments(run: RunFolder, settings: dict[str, object]) -> list[str]:
    profile = run.profile if settings["is_launch"] else settings["profile_dir"]
    return [
        f"--file={run.connection}",
        # The launcher recognises the engines of a set by this name, see `ipp_launcher`.
        f"--ident={run.run_id}.{uuid.uuid4().hex}",
        f"--profile-dir={profile}",
        # Generous, because the engines and torch imports of all nodes may share few cores.
        "--timeout=30",
        f"--IPEngine.max_heartbeat_misses={settings['heartbeat_misses']}",
        f"--IPEngine.enable_nanny={not settings['is_launch']}",
    ]


def _wait_for_file(path: Path) -> None:
    """Wait for a file on a shared home.

    Listing the folder, instead of testing for the one name, makes an NFS client ask the server again.

    Raises:
        TimeoutError: The file did not appear within _FILE_TIMEOUT_S.
    """
    deadline = time.monotonic() + _FILE_TIMEOUT_S
    while not any(entry.name == path.name for entry in path.parent.iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {_FILE_TIMEOUT_S:.0f} s")
        time.sleep(_FILE_POLL_S)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_engine(Path(sys.argv[1]))
    else:
        main()
