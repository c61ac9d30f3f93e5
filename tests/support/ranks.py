"""A node of a launch without ipyparallel: the agent's functions called in this process, its messages received."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_launch import agent, runs
from gpu_launch.output import Sink
from gpu_launch.roster import Roster
from gpu_launch.runs import RunFolder
from gpu_launch.spec import LaunchSpec, Way

DEADLINE_S = 60.0


class Node:
    """The notebook's own container as the only node, with `home` as HOME."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "work").mkdir()
        self.crew = runs.create(home)
        self.sink = Sink("127.0.0.1")
        agent._agent = agent._Agent()
        agent._agent.run_id = self.crew.run_id
        self.run: RunFolder | None = None
        self.messages: list[dict[str, Any]] = []
        #: The store's of the latest start.
        self.port = 0

    def close(self) -> None:
        """End everything."""
        if self.run is not None:
            agent.finish(self.run.run_id)
        if agent._agent.server is not None:
            agent._agent.server.end()
        self.sink.close()

    @property
    def server(self) -> Any:
        """The agent's fork server."""
        return agent._agent.server

    def script(self, text: str, name: str = "train.py") -> Path:
        """A script in a folder of its own."""
        path = self.home / "work" / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *command: object, way: Way = Way.FORK, nproc: int = 1, again: bool = False, **parts: Any) -> int:
        """Start ranks of a new run, or of the present one once more."""
        attempt = parts.get("attempt", 0)
        if self.run is None or not again:
            self.run = runs.create(self.home)
        port = agent.describe().port
        if way is Way.FORK:
            assert agent.prepare((), parts.get("environ", {})) == ""
            port = agent.open_store(self.run.run_id, attempt)
        given: dict[str, Any] = {
            "run_id": self.run.run_id,
            "attempt": 0,
            "roster": Roster(own=True, workers=(), nodes=(), nproc_per_node=nproc),
            "master_addr": "127.0.0.1",
            "master_port": port,
            "command": tuple(map(str, command)),
            "module": False,
            "no_python": False,
            "passed": (),
            "shutdown_s": None,
            "cwd": str(self.home / "work"),
            "log_dir": str(self.run.logs),
            "environ": {},
            "python_path": "",
            "channel": self.sink.channel,
            "way": way,
        }
        self.messages, self.port = [], port
        return agent.start(LaunchSpec(**given | parts))

    def until(self, condition: Callable[[], bool]) -> None:
        """Receive until the condition is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.messages
            self.messages += self.sink.receive(100)

    def until_said(self, text: str, stream: str = "stdout") -> None:
        """Receive until the ranks have written this."""
        self.until(lambda: text in self.text(stream))

    def end(self) -> dict[str, Any]:
        """The `exit` message, when it has come and the run is finished."""
        found = self.end_of_start()
        assert self.run is not None
        agent.finish(self.run.run_id)
        return found

    def end_of_start(self) -> dict[str, Any]:
        """The `exit` message, when it has come; the run may go on with another start."""
        self.until(lambda: any(message["kind"] == "exit" for message in self.messages))
        return self.of("exit")[0]

    def launch(self, *command: object, **parts: Any) -> dict[str, Any]:
        """Start, and wait for the end."""
        self.start(*command, **parts)
        return self.end()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The messages of a kind."""
        return [message for message in self.messages if message["kind"] == kind]

    def text(self, stream: str = "stdout", rank: int | None = None) -> str:
        """What came of the ranks' output."""
        return "".join(
            entry[3] or ""
            for message in self.of("output")
            for entry in message["entries"]
            if entry[1] == stream and rank in (None, entry[0])
        )

    def log(self, name: str, local_rank: int = 0) -> Path:
        """A file of the log tree of the latest start."""
        assert self.run is not None
        (path,) = self.run.logs.glob(f"node0/{self.run.run_id}_*/attempt_0/{local_rank}/{name}")
        return path
