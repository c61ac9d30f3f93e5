"""Stacks of real ranks: at work, in native code that holds the GIL, ended, and of other programs."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gpu_launch.common.launch_spec import StartMethod
from gpu_launch.output import stacks
from gpu_launch.worker import agent, rank_stacks

SCRIPT = """
    import ctypes, os, sys, time
    def reduce():
        print("ready", flush=True)
        mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        while True:
            library.pthread_mutex_lock(mutex)   # the second one never returns, and does not release the GIL
    def load():
        print("ready", flush=True)
        time.sleep(600)
    reduce() if os.environ["RANK"] == "0" else load()
"""


def collect(node):
    return [stacks.parse_answer(answer, "rig1") for answer in agent.collect_stacks(node.run.run_id)]


def start(node, text, *, nproc=1, **parts):
    node.start(node.script(text), nproc=nproc, **parts)
    node.until(lambda: node.text().count("ready") == nproc)


@pytest.mark.parametrize("way", [StartMethod.FORK, StartMethod.TORCHRUN])
def test_stacks_of_ranks_that_hang_with_and_without_the_gil(node, way):
    """Asked twice, because a launch may hang for long; torchrun's ranks answer where gpu_launch runs their script."""
    exchange = str(node.home / "exchange")
    Path(exchange).mkdir(exist_ok=True)
    start(node, SCRIPT, nproc=2, way=way, exchange=exchange)
    places = ["at train.py:7 in reduce", "at train.py:10 in load"]
    node.until(lambda: [stacks.describe_place(one.frames) for one in collect(node)] == places)
    found = collect(node)
    assert [stacks.describe_place(one.frames) for one in found] == places
    assert [one.problem for one in found] == ["", ""]
    folder = Path(agent._state.stacks_pattern).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    agent.finish_run(node.run.run_id)
    assert not folder.exists()
    assert agent.collect_stacks(node.run.run_id) == []


def test_programs_are_not_signalled(node):
    """Their default action would end them."""
    script = node.script("print('ready', flush=True); input()")
    node.start(
        sys.executable, "-c", script.read_text().replace("input()", "__import__('time').sleep(600)"), no_python=True
    )
    node.until_printed("ready")
    (found,) = collect(node)
    assert found.problem == "its stacks cannot be read: torchrun or a command started it"
    agent.finish_run(node.run.run_id)


def test_a_rank_that_replaced_the_handler_is_left_alone(node):
    start(
        node,
        """
        import signal, time
        from gpu_launch.worker.rank_stacks import SIGNAL
        signal.signal(SIGNAL, signal.SIG_DFL)
        print("ready", flush=True)
        time.sleep(600)
        """,
    )
    (found,) = collect(node)
    assert found.problem == "its program replaced the handler of the signal that dumps stacks"
    agent.finish_run(node.run.run_id)


def test_flight_recorder_names_the_collectives(node):
    """With gloo: rank 1 waits for a collective that rank 0 has not called. Torch answers while rank 0 holds the GIL."""
    start(
        node,
        """
        import ctypes, os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print("ready", flush=True)
        if os.environ["RANK"] == "0":
            mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            while True:
                library.pthread_mutex_lock(mutex)
        dist.barrier()
        """,
        nproc=2,
        environ={"GPU_LAUNCH_TORCH_SERVER": "1"},
    )
    node.until(lambda: collect(node)[1].collectives == {"default_pg (gloo)": (2, "barrier")})
    found = collect(node)
    assert found[0].collectives == {"default_pg (gloo)": (1, "all_reduce")}
    assert stacks.describe_place(found[1].frames) == "in barrier at train.py:10"
    assert stacks.describe_collectives(found) == [
        "collectives of default_pg (gloo): rank 1 called number 2 (barrier); rank 0 called number 1 (all_reduce)"
    ]
    assert node.text("stderr") == ""
    sockets = sorted(Path(agent._state.stacks_pattern).parent.glob("*.socket"))
    assert len(sockets) == 2 and all(path.is_socket() for path in sockets)
    agent.finish_run(node.run.run_id)


def answer_recorders(path, answers):
    """Serve torch's control plane on a Unix socket: what its handlers answer, and 404 for others."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Log nothing."""

        def do_POST(self):
            body = answers.get(self.path.removeprefix("/handler/"), "")
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body.encode())

    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def record(backend, *names):
    """An answer of torch 2.13's handlers (version 2.10): the fields that are read."""
    entries = [
        {"collective_seq_id": number, "process_group": ["0", "default_pg"], "profiling_name": f"{backend}:{name}"}
        | {"is_p2p": False, "state": "completed"}
        for number, name in enumerate(names, 1)
    ]
    return json.dumps({"entries": entries, "version": "2.10", "pg_config": {}, "pg_status": {}})


@pytest.mark.parametrize(
    ("answers", "collectives"),
    [
        ({"fr_trace_json": record("gloo", "barrier")}, {"default_pg (gloo)": (1, "barrier")}),
        ({"dump_nccl_trace_json": record("nccl", "all_reduce")}, {"default_pg (nccl)": (1, "all_reduce")}),
        (
            {
                "fr_trace_json": record("gloo", "barrier"),
                "dump_nccl_trace_json": record("nccl", "all_reduce", "broadcast"),
            },
            {"default_pg (gloo)": (1, "barrier"), "default_pg (nccl)": (2, "broadcast")},
        ),
        ({"fr_trace_json": '{"version": "2.10"}'}, None),
        ({}, None),
    ],
)
def test_collectives_of_gloo_and_nccl(tmp_path, answers, collectives):
    """Each has a recorder of its own in torch; a torch without CUDA has gloo's alone."""
    with answer_recorders(tmp_path / "0.socket", answers) as server:
        (found,) = rank_stacks.collect(str(tmp_path / "{rank}"), [0])
        server.shutdown()
    assert stacks.parse_answer(found, "rig1").collectives == collectives


@pytest.mark.parametrize("killed", ["engine", "both"])
def test_folder_of_a_killed_process_is_removed(tmp_path, monkeypatch, killed):
    """By the process that ends it, or by the next one of the user; those of running processes are kept."""
    program = """
import os, sys, time
from pathlib import Path
from gpu_launch.worker import main, rank_stacks
if sys.argv[1:] == ["engine"]:
    print(rank_stacks.create_pattern(), flush=True)
    time.sleep(600)
main.supervise([sys.executable, "-c", os.environ["PROGRAM"], "engine"], mark="none/0", log=Path(os.environ["LOG"]),
               grace_s=1, should_run=lambda: True)
"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = Path(rank_stacks.create_pattern()).parent
    log = tmp_path / "log"
    environ = os.environ | {"TMPDIR": str(tmp_path), "PROGRAM": program, "LOG": str(log)}
    with subprocess.Popen([sys.executable, "-c", program], env=environ) as supervisor:
        deadline = time.monotonic() + 60
        while not log.exists() or not log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        left = Path(log.read_text().strip()).parent
        (left / "0").touch()
        if killed == "both":
            supervisor.kill()
        engine = int(left.name.split("-")[2])
        os.kill(engine, signal.SIGKILL)
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if killed == "both":
        assert left.exists()
        other = Path(rank_stacks.create_pattern()).parent
        assert other != kept
    assert not left.exists()
    assert kept.exists()
