"""Ranks that fail, are interrupted, ignore signals or write without end, and what the agent does and reports."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pynvml
import pytest

from gpu_launch.common.launch_spec import StartMethod
from gpu_launch.worker import agent, log_files, processes
from tests.support.nvml.replay import BUSY, Replay, load

#: Starts a child in a separate session that only SIGKILL ends, and writes its process id to a file.
DEFIANT = """
    import os, signal, subprocess, sys, time
    code = ("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "signal.signal(signal.SIGINT, signal.SIG_IGN); print('defies', flush=True); time.sleep(600)")
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    open(sys.argv[1] + ".new", "w").write(str(child.pid))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def is_alive(pid):
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(*pids):
    """Wait for processes to end."""
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def test_failure_is_reported_at_once_and_other_ranks_are_ended(node, tmp_path):
    """The failure is reported with its traceback while other ranks run; those are reported at the end."""
    script = node.script("""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists(sys.argv[1] + ".ready"):
                time.sleep(0.01)
            raise ValueError("mine")
        def stop(*_):
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            os._exit(9)
        signal.signal(signal.SIGTERM, stop)
        open(sys.argv[1] + ".ready", "w").close()
        time.sleep(600)
    """)
    node.start(script, tmp_path / "may-end", nproc=2)
    node.until(lambda: bool(node.of("failed")))
    assert not node.of("exit")
    (failed,) = node.of("failed")
    assert (failed["end"]["rank"], failed["end"]["exit_code"]) == (1, 1)
    assert failed["end"]["error"].rstrip().endswith("ValueError: mine")
    assert failed["end"]["at_ns"] > 0
    (tmp_path / "may-end").touch()
    message = node.end()
    assert message["code"] == 1
    assert [end["exit_code"] for end in message["ends"]] == [9, 1]


@pytest.mark.parametrize("way", [StartMethod.FORK, StartMethod.TORCHRUN, StartMethod.TASK])
def test_an_interrupt_reaches_every_rank(node, way):
    """Python scripts get a KeyboardInterrupt."""
    script = node.script("""
        import time
        try:
            print("ready")
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    nproc = 1 if way is StartMethod.TASK else 2
    command = (sys.executable, "-u", script) if way is StartMethod.TASK else (script,)
    node.start(*command, nproc=nproc, way=way)
    node.until(lambda: node.text().count("ready") == nproc)
    agent.signal_ranks(signal.SIGINT, "run-of-somebody-else")
    agent.signal_ranks(signal.SIGINT, node.run.run_id)
    message = node.end()
    assert node.text().count("interrupted") == nproc
    assert message["code"] == (0 if way is StartMethod.TASK else 130)


def test_sigterm_is_forwarded_once_and_reported_at_the_end(node):
    """Ranks may take their time; exit code 0 after SIGTERM does not mean that the work is done."""
    script = node.script("""
        import signal, sys, time
        def stop(*_):
            print("saving")
            time.sleep(0.3)
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("ready")
        time.sleep(600)
    """)
    node.start(script, nproc=2)
    node.until(lambda: node.text().count("ready") == 2)
    agent.signal_ranks(signal.SIGTERM, node.run.run_id)
    agent.signal_ranks(signal.SIGTERM, node.run.run_id)
    message = node.end()
    assert (message["code"], [end["exit_code"] for end in message["ends"]]) == (143, [0, 0])
    assert (node.text().count("saving"), node.text().count("saved")) == (2, 2)


@pytest.mark.parametrize("way", [StartMethod.FORK, StartMethod.TORCHRUN, StartMethod.TASK])
def test_kill_ends_processes_that_ignore_signals(node, way, tmp_path):
    """Ranks, their children and processes in separate sessions end."""
    script = node.script(textwrap.dedent(DEFIANT) + "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    words = (script, tmp_path / "pid")
    pid = node.start(*((sys.executable, *words) if way is StartMethod.TASK else words), way=way)
    node.until_printed("defies")
    node.until((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    agent.kill_ranks(node.run.run_id)
    wait_gone(pid, child)
    assert node.end()["code"] not in (0, None)


def test_finish_ends_leftover_processes(node, tmp_path):
    """This also happens after a successful end; the fork server stays."""
    assert node.launch(node.script(DEFIANT), tmp_path / "pid")["code"] == 0
    wait_gone(int((tmp_path / "pid").read_text()))
    assert node.server.is_alive()


def test_successful_rank_and_hanging_rank(node):
    """No end is reported before all ranks have ended; killed ranks do not count as failures of others."""
    script = node.script("""
        import os, time
        print("ready")
        if os.environ["RANK"] == "1":
            time.sleep(600)
    """)
    first = node.start(script, nproc=2)
    node.until(lambda: node.text().count("ready") == 2)
    wait_gone(first)
    assert not node.of("exit")
    with pytest.raises(RuntimeError, match="still run here"):
        node.start(script, again=True)
    agent.kill_ranks(node.run.run_id)
    assert [end["exit_code"] for end in node.end()["ends"]] == [0, -9]


def test_binary_output_and_incomplete_lines_are_kept(node):
    """Invalid UTF-8 is replaced in messages; the file has the original bytes."""
    data = bytes(range(256)) * 4
    script = node.script(f"import os; os.write(1, {data!r})")
    assert node.launch(script)["code"] == 0
    assert node.log("stdout.log").read_bytes() == data
    assert node.text() == data.decode("utf-8", "replace")


def test_endless_output_of_a_rank_does_not_block(node):
    """The file has all output, and the sizes in messages add up to it."""
    lines = 400_000
    script = node.script(f"""
        import sys
        for number in range({lines}):
            sys.stdout.write("step %d of many, and the loss of it\\n" % number)
    """)
    assert node.launch(script)["code"] == 0
    whole = node.log("stdout.log").read_text()
    assert whole.count("\n") == lines
    entries = [entry for message in node.of("output") for entry in message["entries"]]
    assert sum(entry[4] if entry[3] is None else len(entry[3]) for entry in entries) == len(whole)
    assert f"step {lines - 1} of" in node.text()


def test_full_disk_fails_the_rank_and_is_reported(node, monkeypatch):
    """The agent itself continues."""

    def make_full(*words):
        made = log_files.create_log_tree(*words)
        for each in made:
            each.stdout.unlink()
            each.stdout.symlink_to("/dev/full")
        return made

    def is_full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gpu_launch.worker.runners.fork.create_log_tree", make_full)
        patch.setattr(tempfile, "TemporaryFile", is_full)
        message = node.launch(node.script("print('x' * 100)"))
    (end,) = message["ends"]
    assert "No space left on device" in end["error"]
    assert message["note"].startswith("The disk or the quota of the log files is full")
    assert node.launch(node.script("print('again')"))["code"] == 0


def test_start_fails_if_logs_cannot_be_created(node):
    """The start fails before any rank runs."""
    with pytest.raises(RuntimeError, match=r"the ranks cannot be started: .*Not a directory"):
        node.start(node.script("pass"), log_dir="/dev/null/x")


def test_dead_fork_server_ends_its_ranks_and_is_replaced(node):
    """The launch is informed."""
    pid = node.start(node.script("import time; print('ready'); time.sleep(600)"))
    node.until_printed("ready")
    node.server._process.kill()
    message = node.end()
    assert message["code"] == 1
    assert message["note"].startswith("The fork server has ended")
    wait_gone(pid)
    assert node.launch(node.script("print('again')"))["code"] == 0


def test_task_runs_one_program_in_its_folder(node):
    """It has the variables of a node's only rank, the same log files, and its own exit code."""
    words = ("bash", "-c", 'echo "$GROUP_RANK of $GROUP_WORLD_SIZE in $PWD $MINE"; echo oops >&2; exit 4')
    node.script("")
    message = node.launch(*words, way=StartMethod.TASK, environ={"MINE": "x"})
    assert message["code"] == 4
    (failed,), (end,) = node.of("failed"), message["ends"]
    assert failed["end"] == end
    assert (end["rank"], end["exit_code"], end["error"]) == (0, 4, "oops\n")
    assert node.text() == f"0 of 1 in {node.home}/work x\n"
    assert node.log("stderr.log").read_text() == "oops\n"


def test_progress_is_reported_on_change(node):
    """Messages have the metrics that the script reports."""
    script = node.script("""
        import time, gpu_launch
        for step in range(1, 4):
            gpu_launch.report(step, 3, loss=0.5)
            time.sleep(0.6)
    """)
    assert node.launch(script)["code"] == 0, node.text("stderr")
    told = node.of("progress")
    assert told[-1] | {"attempt": 0} == told[-1]
    assert {key: told[-1][key] for key in ("rank", "step", "total", "metrics")} == {
        "rank": 0, "step": 3, "total": 3, "metrics": {"loss": 0.5}
    }  # fmt: skip
    assert len({message["step"] for message in told}) == len(told)


def test_gpu_readings_are_reported_while_ranks_run(node, monkeypatch):
    """Values that NVML does not know are None, and a failing rank's GPU is named."""
    nvml = Replay(BUSY)
    nvml.change("nvmlDeviceGetPowerUsage", pynvml.NVMLError_NotSupported)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    node.start(node.script("import time; time.sleep(600)"))
    node.until(lambda: bool(node.of("gpus")))
    agent.kill_ranks(node.run.run_id)
    (end,) = node.end()["ends"]
    recorded = load(BUSY)["monitored"]
    assert end["gpu"] == f"NVIDIA H200 {recorded[0]['uuid']}"
    assert node.of("gpus")[0]["readings"] == [{**reading, "power_w": None} for reading in recorded]


ENGINE = """
    import sys, time
    from pathlib import Path
    from tests.support.launch.agent_node import Node

    node = Node(Path(sys.argv[1]))
    pid = node.start(sys.argv[2], sys.argv[3])
    node.until_printed("defies")
    print(node.server._process.pid, pid, flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_worker_or_its_engine(tmp_path):
    """A killed engine ends fork server and ranks, and its worker ends all other processes."""
    (tmp_path / "home").mkdir()
    (tmp_path / "engine.py").write_text(textwrap.dedent(ENGINE))
    # The child can only be found by its place in the process tree.
    (tmp_path / "rank.py").write_text(textwrap.dedent(DEFIANT).replace("start_new", "env={}, start_new"))
    with (tmp_path / "rank.py").open("a") as file:
        file.write("\ntime.sleep(600)\n")
    code = f"""
import sys
from pathlib import Path
from gpu_launch.worker import main
arguments = [sys.executable, {str(tmp_path / "engine.py")!r}, {str(tmp_path / "home")!r},
             {str(tmp_path / "rank.py")!r}, {str(tmp_path / "child")!r}]
sys.exit(main.supervise(arguments, mark="none/0", log=Path({str(tmp_path / "log")!r}), grace_s=1,
                          should_run=lambda: True))
"""
    root = str(Path(__file__).parents[4])
    environ = os.environ | {"HOME": str(tmp_path / "home"), "PYTHONPATH": root}
    main = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "child").exists() or len((tmp_path / "log").read_text().split()) < 2:
            assert time.monotonic() < deadline and main.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        server, rank = map(int, (tmp_path / "log").read_text().split()[-2:])
        child = int((tmp_path / "child").read_text())
        (engine,) = [pid for pid in processes.find_descendants(main.pid) if "engine.py" in cmdline(pid)]
        assert all(map(is_alive, (server, rank, child)))
        os.kill(engine, signal.SIGKILL)
        wait_gone(engine, server, rank, child)
        assert main.wait(60) == 137
    finally:
        main.kill()
        main.wait()


def cmdline(pid):
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_worker_reaps_orphans_and_not_its_engine(tmp_path):
    """No zombies remain while it runs, and the exit code is the engine's."""
    engine = (
        "import os, time; os.fork() or os._exit(0); pid = os.fork(); pid or os._exit(0); time.sleep(0.3); os._exit(5)"
    )
    code = f"""
import sys
from pathlib import Path
from gpu_launch.worker import main
sys.exit(main.supervise([sys.executable, "-c", {engine!r}], mark="none/0", log=Path({str(tmp_path / "log")!r}),
                          grace_s=1, should_run=lambda: True))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 5
