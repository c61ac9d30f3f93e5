"""A rank that stays: joins the process group, then runs the cells that the notebook sends, until it is told to end.

`python -m gpu_launch.standing.rank CONTROL`, in torchrun's environment; CONTROL is what `Control.write` wrote.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_launch import environment, pickles
from gpu_launch.standing import health
from gpu_launch.standing.control import Link, Message
from gpu_launch.standing.executor import Executor, flush


class Rank:
    """One rank's loop."""

    def __init__(self, control: Path) -> None:
        self._module = ModuleType("__main__")
        # Where pickle looks classes of a cell up, when a DataLoader's worker starts or a model is saved.
        sys.modules["__main__"] = self._module
        self._executor = Executor(self._module)
        self.rank = int(os.environ["RANK"])
        self._link = Link(control, self.rank, on_interrupt=self._executor.interrupt)
        self._device: Any = None

    def serve(self) -> int:
        """Until the notebook ends it; the exit code."""
        self._say("hello", node=environment.read().node, pid=os.getpid())
        try:
            self._join()
        except Exception:
            self._say("ready", error=traceback.format_exc())
            self._link.close()
            raise
        self._say("ready", error="", device=str(self._device))
        while (message := self._link.receive()).header["kind"] != "end":
            if message.header["kind"] == "check":
                number = message.header["number"]
                problem = health.find_problem(number, self._device, limit_s=message.header["limit_s"])
                self._say("checked", number=number, problem=problem)
            else:
                self._run(message)
        self._link.close()
        health.leave()
        return 0

    def _say(self, kind: str, frames: Sequence[bytes] = (), **content: Any) -> None:
        self._link.send({"kind": kind, **content}, frames)

    def _join(self) -> None:
        import torch
        import torch.distributed as dist

        local_rank = int(os.environ["LOCAL_RANK"])
        self._device = health.join(local_rank)
        vars(self._module).update(
            __builtins__=sys.modules["builtins"],
            rank=self.rank,
            world_size=dist.get_world_size(),
            local_rank=local_rank,
            device=self._device,
            dist=dist,
            torch=torch,
        )

    def _run(self, message: Message) -> None:
        cell = message.header
        returned: list[bytes] = []
        problems: list[str] = []

        def work() -> None:
            self._take(cell["sources"], message.frames)
            self._executor.execute(cell["body"], label=cell["label"], source=cell["source"], skipped=cell["skipped"])
            self._pack(cell["returns"], returned, problems)

        outcome = self._executor.run(cell["cell"], work)
        flush()
        self._say(
            "ended",
            returned,
            cell=cell["cell"],
            how=outcome.how,
            error=outcome.error,
            at_ns=outcome.at_ns,
            problems=problems,
            written=[_size(1), _size(2)],
        )

    def _take(self, sources: Mapping[str, str], frames: Sequence[bytes]) -> None:
        """Put what came with the cell among its names."""
        for label, text in sources.items():
            linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
        for data in frames:
            try:
                vars(self._module).update(pickles.load(data))
            except Exception as error:
                error.add_note("gpu_launch: what --send gave cannot be read in the rank")
                raise

    def _pack(self, names: Sequence[str], returned: list[bytes], problems: list[str]) -> None:
        """The values, empty for one that cannot be sent, and why."""
        for name in names:
            data = b""
            if name not in vars(self._module):
                problems.append(f"it has no variable {name}")
            else:
                try:
                    data = pickles.dump(vars(self._module)[name], name)
                except pickles.CannotPickle as error:
                    problems.append(str(error))
                except pickles.TooLarge:
                    problems.append(f"{name} has more than {pickles.MOST_BYTES // 1024**3} GiB; save it to a file")
            returned.append(data)


def _size(number: int) -> int:
    """Bytes in the log file that is this stream; 0 where it is no file."""
    try:
        return os.fstat(number).st_size
    except OSError:
        return 0


def main() -> None:
    """Serve; an error at the start is shown by Python."""
    sys.exit(Rank(Path(sys.argv[1])).serve())


if __name__ == "__main__":
    main()
