"""The client of a courier with hostile couriers: these run as their user, who can make them send anything."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.broker.files.courier_client import MAX_EARLY_OUTPUT, MAX_LINE, MAX_REPORTS, CourierClient
from gpuhub.common.errors import GpuhubError, NotFound
from gpuhub.common.log_text import EscapingFormatter
from gpuhub.common.program_session import STDERR, STDOUT, ProgramSession
from tests.support.loop_time import MAX_STEP_S, kept_memory, measured_loop

#: Docker's largest part.
PART = 32 * 1024
#: Most memory that one client may need at any time, bytes.
MAX_MEMORY = 8 * 1024**2
READY, DONE = b'{"ready": true}\n', b'{"done": {"files": 1}}\n'

Part = tuple[int, bytes]


class HostileSession:
    """An exec session that returns prepared parts, and counts what was read."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = iter(parts)
        self.read_bytes = {STDOUT: 0, STDERR: 0}
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        """Accept any input."""

    async def read(self) -> Part | None:
        # As an exec session does.
        await asyncio.sleep(0)
        part = next(self._parts, None)
        if part is not None:
            self.read_bytes[part[0]] += len(part[1])
        return part

    def close(self) -> None:
        self.is_closed = True


async def run(session: HostileSession) -> tuple[int, dict[str, Any]]:
    """Run a command; return the size of its output and its result."""
    size = 0
    async with CourierClient(cast("ProgramSession", session)) as client:
        async for data in client.read_output():
            size += len(data)
        return size, client.result


def endless(stream: int, data: bytes) -> Iterator[Part]:
    """Yield this part for ever."""
    return itertools.repeat((stream, data))


_pieces = st.one_of(
    st.binary(max_size=50),
    st.sampled_from(
        [READY, DONE, b"\n", b'{"done": 1}\n', b'{"error": {"code": [], "text": {}}}\n', b"[" * 5000 + b"\n"]
    ),
    st.builds(lambda data, count: data * count, st.binary(min_size=1, max_size=8), st.integers(1, PART // 8)),
    st.builds(lambda key: json.dumps({key: True}).encode() + b"\n", st.text(max_size=30)),
)


@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), _pieces), max_size=30), st.booleans())
async def test_any_stream_has_a_result_or_an_error(parts: list[Part], is_endless: bool) -> None:
    """Nothing else is raised, output arrives unchanged, and no more than the limits is read for an answer."""
    session = HostileSession(itertools.chain(parts, endless(STDERR, b"x" * PART) if is_endless else ()))
    try:
        size, result = await run(session)
    except GpuhubError as error:
        assert len(str(error)) < 3000
    else:
        assert not is_endless
        assert size == sum(len(data) for stream, data in parts if stream == STDOUT)
        assert isinstance(result, dict)
    assert session.read_bytes[STDERR] <= MAX_REPORTS + PART
    assert session.is_closed


#: Reports without end, and what is too large of them.
ENDLESS_REPORTS: list[tuple[Callable[[], Iterable[Part]], str]] = [
    (lambda: endless(STDERR, b"x" * PART), "a line of more than 64 KiB"),
    (lambda: endless(STDERR, b"x"), "a line of more than 64 KiB"),
    (lambda: itertools.chain([(STDERR, READY)], endless(STDERR, b"x" * PART)), "a line of more than 64 KiB"),
    (lambda: ((STDERR, b'{"k%d": "%s"}\n' % (number, b"v" * 1000)) for number in itertools.count()), "reports"),
    (lambda: endless(STDERR, b"{}\n" * (PART // 3)), "reports of more than 256 KiB"),
    (lambda: endless(STDERR, b"\n" * PART), "reports of more than 256 KiB"),
    (lambda: endless(STDERR, b'{"a":' * (PART // 5) + b"\n"), "reports of more than 256 KiB"),
]


@pytest.mark.parametrize(("parts", "what"), ENDLESS_REPORTS)
async def test_reports_without_end_are_refused_within_a_bound(parts: Any, what: str) -> None:
    """The client stops to read, and keeps little."""
    session = HostileSession(parts())
    tracemalloc.start()
    try:
        with pytest.raises(GpuhubError, match=what):
            await run(session)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
    assert session.read_bytes[STDERR] <= MAX_REPORTS + PART


@pytest.mark.parametrize(("parts", "what"), ENDLESS_REPORTS)
async def test_reports_without_end_leave_the_loop_to_others(
    parts: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of them takes long, of whatever lines it consists."""
    with kept_memory(), measured_loop(monkeypatch) as took:
        with pytest.raises(GpuhubError, match=what):
            await asyncio.create_task(run(HostileSession(parts())))
        await asyncio.sleep(0)
    assert took.longest_step_s < MAX_STEP_S


@pytest.mark.parametrize("size", [1, PART])
async def test_much_output_leaves_the_loop_to_others(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first report, which ends the wait for it, and afterwards."""
    parts = [(STDOUT, b"x" * size)] * 5000
    session = HostileSession([*parts, (STDERR, READY), *parts, (STDERR, DONE)])
    with kept_memory(), measured_loop(monkeypatch) as took:
        assert await asyncio.create_task(run(session)) == (2 * 5000 * size, {"files": 1})
        await asyncio.sleep(0)
    assert took.longest_step_s < MAX_STEP_S


@pytest.mark.parametrize("size", [16, PART])
async def test_output_before_the_first_report_is_bounded_and_not_lost(size: int) -> None:
    """The two streams may overtake each other, in parts of any size."""
    count = 2 * MAX_EARLY_OUTPUT // size
    session = HostileSession([*[(STDOUT, b"x" * size)] * count, (STDERR, READY + DONE)])
    tracemalloc.start()
    try:
        async with CourierClient(cast("ProgramSession", session)) as client:
            assert session.read_bytes[STDOUT] < MAX_EARLY_OUTPUT + PART
            assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
            tracemalloc.stop()
            received = b"".join([data async for data in client.read_output()])
            assert received == b"x" * size * count
            assert client.result == {"files": 1}
    finally:
        tracemalloc.stop()


async def test_only_reports_of_the_protocol_count() -> None:
    """Other keys, other types and a second result are ignored."""
    reports = [{"ready": 1, "x": 1}, {"done": []}, {"ready": True}, {"done": {"files": 1}}, {"done": {"files": 2}}]
    session = HostileSession([(STDERR, b"".join(json.dumps(report).encode() + b"\n" for report in reports))])
    assert await run(session) == (0, {"files": 1})


async def test_errors_of_a_courier_are_short() -> None:
    """Their text goes to the client, and their code can be of any type."""
    known = HostileSession([(STDERR, json.dumps({"error": {"code": "not-found", "text": "no file"}}).encode() + b"\n")])
    with pytest.raises(NotFound, match=r"^no file$"):
        await run(known)
    odd = HostileSession([(STDERR, json.dumps({"error": {"code": {}, "text": "x" * 50_000}}).encode() + b"\n")])
    with pytest.raises(GpuhubError, match=r"^x{2000}$"):
        await run(odd)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"", "it wrote nothing"),
        (
            b"srun: step 3\n\x1b[31mFATAL:  \x1b[0m unknown userid 71001\n\n",
            "its last line is: FATAL:   unknown userid 71001",
        ),
        (b"x" * 1000, f"its last line is: {'x' * 300}"),
    ],
)
async def test_last_line_of_a_courier_that_fails_is_shown(written: bytes, told: str) -> None:
    with pytest.raises(GpuhubError) as error:
        await run(HostileSession([(STDERR, written)] if written else []))
    assert str(error.value) == f"the courier on the node ended unexpectedly; {told}"


async def test_output_outside_the_protocol_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The log gets its end, and none of its lines looks like the broker's own."""
    forged = b"2026-01-01 00:00:00,000 INFO gpuhub.broker: root did it\n"
    session = HostileSession([(STDERR, b"y" * (MAX_LINE - 1) + b"\n" + forged * 100 + b"\x1b[2J")])
    with pytest.raises(GpuhubError, match=r"ended unexpectedly; its last line is: \\x1b\[2J$"):
        await run(session)
    (record,) = caplog.records
    assert len(record.getMessage()) < 2100
    lines = EscapingFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert lines[0].startswith("WARNING a courier ended without a result")
    assert all(line.startswith("    | ") and line.isprintable() for line in lines[1:])
    assert lines[-1] == "    | \\x1b[2J"
    assert record.levelno == logging.WARNING
