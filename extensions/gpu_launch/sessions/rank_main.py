"""A rank of a session: joins the process group, then runs the notebook's cells until the notebook ends it.

`python -m gpu_launch.sessions.rank_main CONTROL [--alone]`, in torchrun's environment. CONTROL is the file that
`ControlServer.write_credentials` wrote. A rank `--alone` runs the cells of `%%gpu`: it joins no group, and exchanges
its variables with the notebook.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_launch import environment
from gpu_launch.common import exchange
from gpu_launch.sessions.channel import ControlClient, ControlMessage
from gpu_launch.sessions.executor import SessionExecutor, flush_streams
from gpu_launch.sessions.rank_variables import RankVariables
from gpu_launch.worker import rank_debugger, rank_displays, rank_stacks

#: The argument of a rank that joins no group.
ALONE = "--alone"
_POLL_S = 0.002


def main() -> None:
    """Serve; Python shows an error at the start."""
    sys.exit(SessionRank(Path(sys.argv[1]), is_alone=ALONE in sys.argv[2:]).serve())


class SessionRank:
    """The main loop of one rank."""

    def __init__(self, control: Path, *, is_alone: bool = False) -> None:
        self._module = ModuleType("__main__")
        vars(self._module)["__builtins__"] = sys.modules["builtins"]
        # pickle looks up classes of a cell here when a DataLoader's worker starts or a model is saved.
        sys.modules["__main__"] = self._module
        self._executor = SessionExecutor(self._module)
        self._debugger = rank_debugger.find_installed()
        sys.displayhook = show_value
        rank_displays.expect_cells()
        self.rank = int(os.environ["RANK"])
        self._link = ControlClient(control, self.rank, on_interrupt=self._executor.interrupt)
        self._device: Any = None
        self._variables = RankVariables(vars(self._module)) if is_alone else None

    def serve(self) -> int:
        """Serve until the notebook ends the rank; return the exit code."""
        self._send("hello", node=environment.read().node, pid=os.getpid())
        try:
            if self._variables is None:
                self._join()
        except Exception:
            self._send("ready", error=traceback.format_exc())
            self._link.close()
            raise
        self._send("ready", error="", device="" if self._device is None else str(self._device))
        while (message := self._receive()).header["kind"] != "end":
            if message.header["kind"] == "check":
                number = message.header["number"]
                problem = (
                    ""
                    if self._variables is not None
                    else check_group(number, self._device, limit_s=message.header["limit_s"])
                )
                self._send("checked", number=number, problem=problem)
            else:
                self._run(message)
        self._link.close()
        if self._variables is None:
            destroy_group()
        return 0

    def _receive(self) -> ControlMessage:
        """Wait for a message; meanwhile the debugger shows where the last cell failed."""
        if self._debugger is None:
            return self._link.receive()
        self._debugger.failure, self._debugger.is_idle = self._executor.failure, True
        try:
            return self._link.receive()
        finally:
            self._debugger.failure, self._debugger.is_idle = None, False

    def _send(self, kind: str, frames: Sequence[bytes] = (), **content: Any) -> None:
        self._link.send({"kind": kind, **content}, frames)

    def _join(self) -> None:
        import torch
        import torch.distributed as dist

        local_rank = int(os.environ["LOCAL_RANK"])
        self._device = join_group(local_rank)
        # A process group has threads already, so that those of the server change nothing.
        rank_stacks.start_torch_server(os.environ)
        vars(self._module).update(
            rank=self.rank,
            world_size=dist.get_world_size(),
            local_rank=local_rank,
            device=self._device,
            dist=dist,
            torch=torch,
        )

    def _run(self, message: ControlMessage) -> None:
        cell = message.header
        returned: list[bytes] = []
        problems: list[str] = []

        def work() -> None:
            self._take_variables(cell, message.frames)
            try:
                self._executor.execute(
                    cell["body"], label=cell["label"], source=cell["source"], skipped=cell["skipped"]
                )
                rank_displays.end_cell()
            except NameError as error:
                if error.name in (unsent := cell["variables"].get("unsent", {})):
                    error.add_note(f"gpu_launch: {error.name} is not on the worker: {unsent[error.name]}")
                raise
            self._pickle_returns(cell["returns"], returned, problems)

        outcome = self._executor.run(cell["cell"], work)
        flush_streams()
        self._send(
            "ended",
            returned,
            cell=cell["cell"],
            how=outcome.outcome,
            error=outcome.error,
            at_ns=outcome.at_ns,
            problems=problems,
            written=[_stream_size(1), _stream_size(2)],
            displays=rank_displays.count_displays(),
        )
        if self._variables is not None:
            self._send_variables(self._variables, cell["cell"])

    def _take_variables(self, cell: Mapping[str, Any], frames: Sequence[bytes]) -> None:
        if self._variables is None:
            self._load_sent_names(cell["sources"], frames)
            return
        self._load_sent_names(cell["sources"], ())
        self._variables.take(cell["variables"], frames)

    def _send_variables(self, variables: RankVariables, number: int) -> None:
        """Send what a cell made, also where it failed: a notebook keeps that as well."""
        changes, deleted = variables.find_changes()
        self._send(
            "variables",
            () if changes.data is None else (changes.data,),
            cell=number,
            taken=variables.has_taken,
            sizes=dict(changes.sizes),
            modules=dict(changes.modules),
            submodules=variables.list_submodules(),
            refused=dict(changes.refused),
            too_large=sorted(changes.too_large),
            deleted=deleted,
        )

    def _load_sent_names(self, sources: Mapping[str, str], frames: Sequence[bytes]) -> None:
        """Add the variables that were sent with the cell to its namespace."""
        for label, text in sources.items():
            linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
        for data in frames:
            try:
                vars(self._module).update(exchange.load_value(data))
            except Exception as error:
                error.add_note("gpu_launch: what --send gave cannot be read in the rank")
                raise

    def _pickle_returns(self, names: Sequence[str], returned: list[bytes], problems: list[str]) -> None:
        """Pickle the cell's values, an empty one with a problem if it cannot be sent."""
        for name in names:
            data = b""
            if name not in vars(self._module):
                problems.append(f"it has no variable {name}")
            else:
                try:
                    data = exchange.dump_value(vars(self._module)[name], name)
                except exchange.CannotPickle as error:
                    problems.append(str(error))
                except exchange.TooLarge:
                    problems.append(f"{name} has more than {exchange.MAX_BYTES // 1024**3} GiB; save it to a file")
            returned.append(data)


def show_value(value: Any) -> None:
    """Show the value of a cell's last line, and keep it as `_`: what has a richer form as a display, else its text."""
    if value is None or not rank_displays.show_value(value):
        sys.__displayhook__(value)
    else:
        builtins._ = value  # type: ignore[attr-defined]


def _stream_size(number: int) -> int:
    """Return the size of the log file behind a stream, 0 if it is not a file."""
    try:
        return os.fstat(number).st_size
    except OSError:
        return 0


def join_group(local_rank: int) -> Any:
    """Create the default group, NCCL on GPUs and gloo without; return this rank's device."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def check_group(number: int, device: Any, *, limit_s: float) -> str:
    """Check the group by adding up `number` on all ranks; return the problem, empty if the group is usable.

    A rank that is ahead of the others by a collective would combine theirs with this one and get a different sum.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return "its default process group is gone"
    try:
        value = torch.full((1,), float(number), dtype=torch.float64, device=device)
        work = dist.all_reduce(value, async_op=True)
        deadline = time.monotonic() + limit_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                return f"a small all_reduce has not ended within {limit_s:g} s"
            time.sleep(_POLL_S)
        work.wait()
        total, expected = value.item(), float(number * dist.get_world_size())
    except Exception as error:  # noqa: BLE001 - whatever a broken group raises is the answer
        first_line = str(error).strip().partition("\n")[0]
        return f"a small all_reduce failed: {type(error).__name__}: {first_line}"
    return "" if total == expected else "the ranks are not at the same collective"


def destroy_group() -> None:
    """Destroy the group if it still exists."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
