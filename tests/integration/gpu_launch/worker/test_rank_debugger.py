"""The debugger on real ranks: at breakpoint(), on request while they run, after a failure, and without a debugger."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_launch.errors import LaunchFailed
from gpu_launch.worker import agent, debugger_client, rank_debugger

STOPPING = """
    import os, sys
    rank = int(os.environ["RANK"])
    for step in range(3):
        if step == 1:
            breakpoint()
        print("step", step, rank, flush=True)
"""


def ask(node, line=None, rank=0):
    """Return what the debugger writes until it waits for a line, or is over."""
    text, deadline = "", time.monotonic() + 20
    while True:
        answer = agent.exchange_with_debugger(node.run.run_id, rank, line)
        text, line = text + answer["text"], None
        if answer["is_ready"] or answer["is_over"]:
            return text, answer["is_over"]
        assert time.monotonic() < deadline, text


def await_stop(node, count=1):
    node.until(lambda: len(node.of("stopped")) >= count)
    return node.of("stopped")


def test_breakpoint_waits_for_a_debugger_and_steps(node):
    node.start(node.script(STOPPING))
    (stop,) = await_stop(node)
    assert (stop["rank"], stop["reason"], stop["place"], stop["detail"]) == (0, "breakpoint", "train.py:6", "")
    folder = Path(agent._state.stacks_pattern).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "0.debug").is_socket() and (folder / "0.debug").stat().st_mode & 0o777 == 0o600
    text, is_over = ask(node)
    assert "train.py(7)<module>()\n-> print(" in text and not is_over
    assert ask(node, "p rank, step") == ("(0, 1)\n", False)
    assert ask(node, "!step = 40") == ("", False)
    text, _ = ask(node, "n")
    assert "train.py(4)<module>()\n-> for step" in text
    assert "cannot be started again" in ask(node, "restart")[0]
    # The loop's next value; the breakpoint is not reached again.
    agent.exchange_with_debugger(node.run.run_id, 0, "c")
    assert node.end()["code"] == 0
    assert node.text() == "step 0 0\nstep 40 0\nstep 2 0\n"
    assert node.text("stderr") == ""


def test_ranks_that_are_not_debugged_continue_and_q_ends_all_stops(node):
    """Both stop; the launch lets one go, as it does for all but one."""
    script = node.script(STOPPING.replace("step == 1", "step >= 1"))
    node.start(script, nproc=2)
    stops = await_stop(node, 2)
    assert {stop["rank"] for stop in stops} == {0, 1}
    agent.continue_ranks(node.run.run_id, (1,))
    ask(node)
    node.until(lambda: "step 1 1" in node.text())
    # Rank 1 stops at the next one again.
    await_stop(node, 3)
    agent.continue_ranks(node.run.run_id, (0, 1))
    assert ask(node, "q") == ("Rank 0 continues, and stops at no breakpoint() any more.\n", True)
    assert node.end()["code"] == 0
    assert sorted(node.text().splitlines()) == sorted(f"step {step} {rank}" for step in range(3) for rank in (0, 1))


def test_rank_of_debug_alone_stops_and_shows_where_it_failed(node):
    """A debugger that is connected at breakpoint() gets the failure too, and one that has gone is waited for again."""
    node.start(
        node.script(
            """
            import os, torch.distributed as dist
            rank = int(os.environ["RANK"])
            breakpoint()
            print("timeout", dist.distributed_c10d._get_default_timeout("gloo"), flush=True)
            def load(path):
                wanted = path.upper()
                raise ValueError(f"no {wanted}")
            if rank == 1:
                load("data")
            """
        ),
        nproc=2,
        debug=1,
    )
    (stop,) = await_stop(node)
    assert (stop["rank"], stop["reason"]) == (1, "breakpoint")
    ask(node, rank=1)
    text, _ = ask(node, "c", rank=1)
    assert text.startswith("rank 1 failed at train.py:8 in load: ValueError: no DATA\n")
    assert "train.py(8)load()\n-> raise ValueError" in text
    assert ask(node, "p wanted", rank=1) == ("'DATA'\n", False)
    assert "train.py(10)<module>()" in ask(node, "up", rank=1)[0]
    assert ask(node, "c", rank=1)[1]
    assert node.end()["code"] == 1
    assert node.text().splitlines() == ["timeout 1 day, 0:00:00"] * 2
    assert "ValueError: no DATA" in node.text("stderr", rank=1)
    node.start(node.script("raise ValueError('at once')"), debug=0)
    (stop,) = await_stop(node)
    assert (stop["reason"], stop["place"], stop["detail"]) == ("exception", "train.py:1", "ValueError: at once")
    assert "-> raise ValueError" in ask(node)[0]
    agent.leave_debugger(node.run.run_id, 0)
    assert node.end()["code"] == 1


RUNNING = """
    import os, time
    def train(step):
        time.sleep(0.01)
        return step + 1
    print("ready", flush=True)
    step = 0
    while step >= 0:
        step = train(step)
    print("left", flush=True)
"""


def test_running_rank_stops_on_request(node):
    node.start(node.script(RUNNING))
    node.until_printed("ready")
    run_id = node.run.run_id
    assert agent.stop_rank(run_id, 0) == ""
    node.until(lambda: not agent.exchange_with_debugger(run_id, 0, None)["is_over"])
    ask(node, "p 'here'")
    assert node.of("stopped") == [], "whoever asked knows it"
    path = debugger_client.find_rank(0, run_id)
    assert path is not None and debugger_client.find_rank(0, "run-other") is None
    assert debugger_client.list_ranks(run_id) == [0]
    with pytest.raises(LaunchFailed, match="another debugger is connected"):
        debugger_client.connect(path, limit_s=0.3)
    text, _ = ask(node, "b 9")
    assert "Breakpoint 1 at" in text
    assert "train.py(9)" in ask(node, "c")[0]
    assert ask(node, "!step = -5")[0] == ""
    # One that is gone without a word does not hold the rank.
    agent.leave_debugger(run_id, 0)
    assert node.end()["code"] == 0
    assert "left" in node.text()


def test_terminal_debugs_a_rank_of_its_container(node, tmp_path):
    """The program that `gpu-launch debug` runs, with a real terminal's input as a pipe."""
    node.start(node.script(RUNNING))
    node.until_printed("ready")
    program = "import sys; from gpu_launch.cli.main import main; main(['debug', *sys.argv[1:], '--rank', '0'])"
    result = subprocess.run(
        [sys.executable, "-c", program, node.run.run_id],
        input="up\np step >= 0\n!step = -9\nq\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "c continues, n and s step" in result.stdout and "(rank 0) " in result.stdout
    assert "Rank 0 continues, and stops at no breakpoint() any more." in result.stdout
    agent.signal_ranks(signal.SIGKILL, node.run.run_id)
    node.end()
    # Another container's temporary folder has no ranks.
    missing = subprocess.run(
        [sys.executable, "-c", program, "--here", "run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert missing.returncode == 1
    assert missing.stderr == ("Rank 0 does not run in this container, or torchrun started it. Ranks here: none.\n")


def test_rank_continues_when_no_debugger_comes(node):
    node.start(node.script(STOPPING), environ={rank_debugger.WAIT_VARIABLE: "1"})
    assert node.end()["code"] == 0
    assert node.text("stderr") == "gpu_launch: no debugger came within 1 s, the rank continues\n"
    assert node.text().count("step") == 3


def test_interrupt_reaches_the_script_at_the_prompt(node):
    node.start(
        node.script(
            """
            try:
                breakpoint()
                print("ran on", flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        )
    )
    await_stop(node)
    ask(node)
    agent.signal_ranks(signal.SIGINT, node.run.run_id)
    node.end()
    assert node.text() == "interrupted\n"


def test_process_that_a_rank_forked_passes_over_breakpoints(node):
    node.start(
        node.script(
            """
            import os
            if not (child := os.fork()):
                breakpoint()
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            """
        )
    )
    assert node.end()["code"] == 0
    assert node.text() == "7\n"
    assert "in a process that a rank has forked is ignored" in node.text("stderr")


def test_editor_attaches_through_debugpy(node):
    """debugpy answers on loopback and nowhere else, and only in a container, whose loopback is its user's alone."""
    node.start(node.script(RUNNING))
    node.until_printed("ready")
    path = debugger_client.find_rank(0, node.run.run_id)
    is_container = Path("/.dockerenv").exists()
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.closing(debugger_client.connect(path, action="listen", port=port)) as client:
        answer = client.receive(30.0)
    assert answer.is_over
    if not is_container:
        assert "where other users could reach the port" in answer.text
    agent.signal_ranks(signal.SIGKILL, node.run.run_id)
    node.end()


def test_listening_is_on_loopback():
    """The server of debugpy itself, in a process of its own, with the protocol's first request."""
    program = (
        "import pathlib, sys, time; from gpu_launch.worker import rank_debugger\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self: str(self) == '/.dockerenv' or exists(self)\n"
        "print(rank_debugger.listen_for_editor(int(sys.argv[1]), rank=3), flush=True)\n"
        "time.sleep(60)\n"
    )
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(port)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"debugpy listens on 127.0.0.1:{port} of rank 3's container.\n"
        listening = subprocess.run(["ss", "-ltnH", f"sport = :{port}"], capture_output=True, text=True, check=True)
        assert [line.split()[3] for line in listening.stdout.splitlines()] == [f"127.0.0.1:{port}"]
        body = json.dumps({"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "debugpy"}})
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert connection.recv(4096).startswith(b"Content-Length: ")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    for value in (80, "5678", None, 70000):
        assert rank_debugger.listen_for_editor(value, rank=0) == f"{value} is not a port from 1024 to 65535.\n"
