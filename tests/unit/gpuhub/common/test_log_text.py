"""Text of users in logs."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from gpuhub.common.log_text import (
    CONTINUATION,
    MAX_OUTPUT_CHARACTERS,
    MAX_RECORD_CHARACTERS,
    EscapingFormatter,
    escape_output,
)

_texts = st.one_of(st.text(), st.builds(lambda text, count: text * count, st.text(min_size=1), st.integers(1, 5000)))


@given(_texts)
def test_output_is_bounded_and_marked(text: str) -> None:
    """Whatever a program writes, each line shows that it is not the log's own, and a terminal shows it as it is."""
    escaped = escape_output(text)
    assert len(escaped) <= MAX_OUTPUT_CHARACTERS
    assert all(line.startswith(CONTINUATION) and line.isprintable() for line in escaped.split("\n"))


def test_end_of_the_output_is_kept() -> None:
    """It has the reason for the end."""
    text = "".join(f"line {number}\n" for number in range(10_000)) + "Traceback é\tx\r\x1b[31m\n"
    assert escape_output("one\ntwo\n") == "    | one\n    | two"
    assert escape_output(text).endswith("    | line 9999\n    | Traceback é\\tx\\r\\x1b[31m")
    assert escape_output("x" * 10_000) == "    | " + "x" * (MAX_OUTPUT_CHARACTERS - 7)


@given(_texts)
def test_record_is_one_line_with_continuations(text: str) -> None:
    """A user's text in a record cannot begin a record of its own."""
    record = logging.LogRecord("gpuhub", logging.INFO, "", 0, "user %s", (text,), None)
    first, *others = EscapingFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first.startswith("INFO user ") and first.isprintable()
    assert all(line.startswith(CONTINUATION) and line.isprintable() for line in others)
    assert len(others) <= MAX_RECORD_CHARACTERS
