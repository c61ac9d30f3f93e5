"""The ranks of a session as real processes: control channel, gloo process group, cells, failures and exits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpu_launch.common import exchange
from gpu_launch.sessions.channel import ControlMessage, ControlServer

pytestmark = pytest.mark.torch

DEADLINE_S = 60.0


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """Two ranks connected to a control channel, started by hand as torchrun would start them."""

    def __init__(self, folder: Path) -> None:
        self.control = ControlServer("127.0.0.1")
        self.path = folder / "session.json"
        self.control.write_credentials(self.path)
        self.logs = folder
        port = str(free_port())
        self.processes = [self._start(rank, port) for rank in range(2)]
        self.number = 0
        ready = self.collect("ready")
        assert [message.header["error"] for message in ready] == ["", ""]

    def _start(self, rank: int, port: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "GPUHUB_NODE": f"rig{rank + 1}",
            "RES_OPTIONS": "timeout:1 attempts:1",
        }  # fmt: skip
        with (self.logs / f"{rank}.out").open("wb") as out, (self.logs / f"{rank}.err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "gpu_launch.sessions.rank_main", str(self.path)],
                env=environ,
                stdout=out,
                stderr=err,
            )

    def send(self, kind: str, *, ranks=(0, 1), frames=(), **content) -> None:
        """Send a message to ranks."""
        for rank in ranks:
            assert self.control.send(ControlMessage(rank=rank, header={"kind": kind, **content}, frames=tuple(frames)))

    def collect(self, kind: str, *, ranks=(0, 1)) -> list[ControlMessage]:
        """Return one message of this kind from every rank, by rank."""
        found: dict[int, ControlMessage] = {}
        deadline = time.monotonic() + DEADLINE_S
        while found.keys() < set(ranks):
            assert time.monotonic() < deadline, f"no {kind} from all: {self.read_output()}"
            for message in self.control.receive(100):
                if message.header["kind"] == kind:
                    found[message.rank] = message
        return [found[rank] for rank in sorted(found)]

    def cell(self, body: str, *, ranks=(0, 1), send=None, returns=()) -> None:
        """Send a cell to ranks."""
        self.number += 1
        self.send(
            "cell", ranks=ranks, frames=() if send is None else (exchange.dump_value(send, "sent"),), cell=self.number,
            body=textwrap.dedent(body), label=f"Cell In[{self.number}]", source=textwrap.dedent(body), skipped=0,
            sources={}, returns=list(returns),
        )  # fmt: skip

    def run(self, body: str, **parts) -> list[ControlMessage]:
        """Run a cell to its end."""
        self.cell(body, **parts)
        return self.collect("ended", ranks=parts.get("ranks", (0, 1)))

    def check(self) -> list[str]:
        """Return the result of the ranks' check of their process group."""
        self.send("check", number=self.number, limit_s=2.0)
        return [message.header["problem"] for message in self.collect("checked")]

    def read_output(self) -> list[str]:
        """Return everything that the ranks printed."""
        return [path.read_text() for path in sorted(self.logs.glob("*.out")) + sorted(self.logs.glob("*.err"))]

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.control.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks that have joined their process group."""
    with contextlib.closing(Ranks(tmp_path)) as found:
        yield found


def test_cells_share_state_and_ranks_exit_cleanly(ranks: Ranks) -> None:
    """Ranks have names, a collective, values in both directions and sizes of their output, and exit cleanly."""
    assert stat.S_IMODE(ranks.path.stat().st_mode) == 0o600
    first = ranks.run(
        "total = torch.tensor([float(rank + 1)], device=device)\ndist.all_reduce(total)\nprint('héllo')\ntotal.item()"
    )
    assert [message.header["how"] for message in first] == ["done", "done"]
    assert ranks.read_output()[:2] == ["héllo\n3.0\n"] * 2
    assert [message.header["written"][0] for message in first] == [len("héllo\n3.0\n".encode())] * 2
    ended = ranks.run(
        "assert world_size == 2 and local_rank == rank\nmine = (total.item(), factor * rank)\nlock = __import__('threading').Lock()",
        send={"factor": 10},
        returns=("mine", "lock", "nothing"),
    )
    assert [exchange.load_value(message.frames[0]) for message in ended] == [(3.0, 0), (3.0, 10)]
    assert ended[1].frames[1:] == (b"", b"")
    assert "lock cannot be pickled" in ended[0].header["problems"][0]
    assert ended[0].header["problems"][1] == "it has no variable nothing"
    # For pickle, a cell's classes belong to the main module.
    assert (
        ranks.run(
            "class Net(torch.nn.Linear): pass\nimport io\ntorch.save(Net(1, 1), io.BytesIO())\nassert Net.__module__ == '__main__'"
        )[0].header["error"]
        == ""
    )
    ranks.run("x = 1", ranks=(1,))
    assert "NameError" in ranks.run("x", ranks=(0,))[0].header["error"]
    assert ranks.check() == ["", ""]
    ranks.send("end")
    assert [process.wait(DEADLINE_S) for process in ranks.processes] == [0, 0]


def test_rank_survives_errors_and_interrupts_of_a_cell(ranks: Ranks) -> None:
    """Errors, interrupts in Python, and a process group that is out of step or destroyed are reported."""
    failed = ranks.run("if rank == 1:\n    raise ValueError('bad')\nprint('fine')")
    assert [message.header["how"] for message in failed] == ["done", "failed"]
    assert "Cell In[1], line 2\n    raise ValueError('bad')" in failed[1].header["error"]
    assert failed[1].header["at_ns"] > 0
    ranks.cell("import time\nprint('sleeps', flush=True)\ntime.sleep(60)")
    deadline = time.monotonic() + DEADLINE_S
    while not all(text.endswith("sleeps\n") for text in ranks.read_output()[:2]):
        assert time.monotonic() < deadline
    ranks.send("interrupt", cell=ranks.number)
    assert [message.header["how"] for message in ranks.collect("ended")] == ["interrupted", "interrupted"]
    assert ranks.check() == ["", ""]
    # Rank 0 is one collective ahead: the check provides the collective that it waits for.
    ranks.run(
        "value = torch.zeros(1, dtype=torch.float64, device=device)\nwork = dist.all_reduce(value, async_op=True)",
        ranks=(0,),
    )
    assert any(ranks.check())


def test_destroyed_process_group_is_reported(ranks: Ranks) -> None:
    """The check reports it, and the ranks still respond."""
    ranks.run("dist.destroy_process_group()")
    assert ranks.check() == ["its default process group is gone"] * 2
    assert ranks.run("1")[0].header["how"] == "done"


def test_value_that_cannot_be_unpickled_fails_the_cell(ranks: Ranks) -> None:
    """The error has the value's origin, and the cell does not run."""
    ranks.send(
        "cell", frames=(b"no pickle",), cell=1, body="print('ran')", label="Cell In[1]", source="", skipped=0,
        sources={"Cell In[9]": "def f(): pass"}, returns=[],
    )  # fmt: skip
    ended = ranks.collect("ended")
    assert ended[0].header["how"] == "failed"
    assert "what --send gave cannot be read in the rank" in ended[0].header["error"]
    assert ranks.read_output()[0] == ""


def test_clients_without_the_key_cannot_connect(tmp_path: Path) -> None:
    """A client without the right key cannot connect, and a missing rank is reported as missing."""
    with contextlib.closing(ControlServer("127.0.0.1")) as control:
        control.write_credentials(tmp_path / "session.json")
        secret = json.loads((tmp_path / "session.json").read_text())
        public, private = zmq.curve_keypair()
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.routing_id = b"0"
        stranger.linger = 0
        stranger.curve_serverkey = secret["server_public"].encode()
        stranger.curve_publickey, stranger.curve_secretkey = public, private
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(secret["url"])
        stranger.send(b'{"kind": "ready"}')
        assert monitor.poll(DEADLINE_S * 1000)
        assert control.receive(0) == []
        assert not control.send(ControlMessage(rank=0, header={"kind": "ping"}))
        stranger.disable_monitor()
        monitor.close()
        stranger.close()
        context.term()


def test_rank_that_cannot_join_exits_with_an_error(tmp_path: Path) -> None:
    """The rank exits with an error."""
    with contextlib.closing(ControlServer("127.0.0.1")) as control:
        control.write_credentials(tmp_path / "session.json")
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_launch.sessions.rank_main", str(tmp_path / "session.json")],
            env=os.environ | {"RANK": "0", "LOCAL_RANK": "0"},
            stderr=subprocess.PIPE,
        )
        _, err = process.communicate(timeout=DEADLINE_S)
        hello, ready = control.receive(1000)
    assert (hello.header["kind"], process.returncode) == ("hello", 1)
    assert "WORLD_SIZE" in ready.header["error"]
    assert b"WORLD_SIZE" in err
