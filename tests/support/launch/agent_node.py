"""A node of a launch without ipyparallel: the agent's functions run in this process, which receives its messages."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import LaunchSpec, Membership, StartMethod
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.common.secure_channel import OutputReceiver
from gpu_launch.worker import agent

DEADLINE_S = 60.0


class Node:
    """The notebook's own container as the only node, with `home` as HOME."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "work").mkdir()
        self.crew = run_folder.create_run(home)
        self.sink = OutputReceiver("127.0.0.1")
        agent._state = agent._AgentState()
        agent._state.run_id = self.crew.run_id
        self.run: RunFolder | None = None
        self.messages: list[dict[str, Any]] = []
        #: The port of the latest start's store.
        self.port = 0

    def close(self) -> None:
        """End all ranks and servers."""
        if self.run is not None:
            agent.finish_run(self.run.run_id)
        if agent._state.fork_server is not None:
            agent._state.fork_server.close()
        self.sink.close()

    @property
    def server(self) -> Any:
        """The agent's fork server."""
        return agent._state.fork_server

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script in a separate folder."""
        path = self.home / "work" / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(
        self, *command: object, way: StartMethod = StartMethod.FORK, nproc: int = 1, again: bool = False, **parts: Any
    ) -> int:
        """Start ranks of a new run, or of the current run `again`."""
        attempt = parts.get("attempt", 0)
        if self.run is None or not again:
            self.run = run_folder.create_run(self.home)
        port = agent.describe_node().port
        if way is StartMethod.FORK:
            assert agent.prepare_forking((), parts.get("environ", {})) == ""
            port = agent.open_store(self.run.run_id, attempt)
        given: dict[str, Any] = {
            "run_id": self.run.run_id,
            "attempt": 0,
            "membership": Membership(includes_notebook=True, workers=(), nodes=(), nproc_per_node=nproc),
            "master_addr": "127.0.0.1",
            "master_port": port,
            "command": tuple(map(str, command)),
            "module": False,
            "no_python": False,
            "torchrun_flags": (),
            "shutdown_s": None,
            "cwd": str(self.home / "work"),
            "log_dir": str(self.run.logs),
            "environ": {},
            "python_path": "",
            "channel": self.sink.channel,
            "start_method": way,
        }
        self.messages, self.port = [], port
        return agent.start_ranks(LaunchSpec(**given | parts))

    def until(self, condition: Callable[[], bool]) -> None:
        """Receive messages until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.messages
            self.messages += self.sink.receive(100)

    def until_printed(self, text: str, stream: str = "stdout") -> None:
        """Receive messages until the ranks have written this."""
        self.until(lambda: text in self.text(stream))

    def end(self) -> dict[str, Any]:
        """Return the `exit` message when it has come and the run is finished."""
        message = self.end_of_start()
        assert self.run is not None
        agent.finish_run(self.run.run_id)
        return message

    def end_of_start(self) -> dict[str, Any]:
        """Return the `exit` message when it has come; the run may continue with another start."""
        self.until(lambda: any(message["kind"] == "exit" for message in self.messages))
        return self.of("exit")[0]

    def launch(self, *command: object, **parts: Any) -> dict[str, Any]:
        """Start ranks and wait for their end."""
        self.start(*command, **parts)
        return self.end()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of a kind."""
        return [message for message in self.messages if message["kind"] == kind]

    def text(self, stream: str = "stdout", rank: int | None = None) -> str:
        """Return the ranks' output."""
        return "".join(
            entry[3] or ""
            for message in self.of("output")
            for entry in message["entries"]
            if entry[1] == stream and rank in (None, entry[0])
        )

    def log(self, name: str, local_rank: int = 0) -> Path:
        """Return a file of the latest start's log tree."""
        assert self.run is not None
        (path,) = self.run.logs.glob(f"node0/{self.run.run_id}_*/attempt_0/{local_rank}/{name}")
        return path
