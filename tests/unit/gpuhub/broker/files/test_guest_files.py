"""What a program of a job's owner says about its folder, before anything is fetched from a guest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.broker.files.guest_files import GuestFiles
from gpuhub.common.errors import GpuhubError

JOB: Any = SimpleNamespace(owner="ada", run_id="run-1")


def build_files(parts: list[bytes]) -> tuple[GuestFiles, list[bytes]]:
    """Return files whose courier answers with `parts`, and the list of those that were read."""
    read: list[bytes] = []

    async def read_output(*, limit_s: float) -> AsyncIterator[bytes]:
        assert limit_s > 0
        for part in parts:
            read.append(part)
            yield part

    @asynccontextmanager
    async def connect(owner: str, arguments: tuple[str, ...]) -> AsyncIterator[Any]:
        assert (owner, arguments) == ("ada", ("job-folder", "--", "run-1"))
        yield SimpleNamespace(read_output=read_output)

    nothing: Any = None
    couriers: Any = SimpleNamespace(connect=connect)
    return GuestFiles(core=nothing, daemons=nothing, couriers=couriers), read


async def test_folder_may_come_in_parts() -> None:
    """The name is any text."""
    files, _ = build_files([b"work/l", "ö".encode()[:1], "ö".encode()[1:], b"ss"])
    assert await files._find_folder(JOB) == "work/löss"


@pytest.mark.parametrize(
    ("parts", "text"),
    [([b"x" * 1000] * 1000, "more than 4096 bytes"), ([b"work/\xff"], "not valid UTF-8")],
    ids=["endless", "bytes"],
)
async def test_other_answers_are_refused_early(parts: list[bytes], text: str) -> None:
    """Otherwise they would fill the broker's memory, or keep the guest's GPU for ever."""
    files, read = build_files(parts)
    with pytest.raises(GpuhubError, match=text):
        await files._find_folder(JOB)
    assert len(read) <= 5
