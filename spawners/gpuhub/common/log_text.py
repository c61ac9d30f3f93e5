"""Text of users in logs that administrators read: it can neither imitate a log's own lines nor fill the log."""

from __future__ import annotations

import logging

#: Maximum number of characters of a user's output in one record, and of one record with its traceback.
MAX_OUTPUT_CHARACTERS = 4096
MAX_RECORD_CHARACTERS = 64 * 1024
#: Begins each line that belongs to the record above it.
CONTINUATION = "    | "


def escape_output(text: str) -> str:
    """Return the last lines of a program's output, at most `MAX_OUTPUT_CHARACTERS`, each marked as a continuation.

    Characters that are not printable are escaped.
    """
    left, lines = MAX_OUTPUT_CHARACTERS, list[str]()
    for line in reversed(text[-MAX_OUTPUT_CHARACTERS:].rstrip("\n").split("\n")):
        left -= len(CONTINUATION) + 1
        if left <= 0:
            break
        lines.append(CONTINUATION + _escape(line)[-left:])
        left -= len(lines[-1]) - len(CONTINUATION)
    return "\n".join(reversed(lines))


def escape_lines(output: bytes) -> str:
    """Return a program's output for a terminal: its lines, with characters that are not printable escaped."""
    return "\n".join(_escape(line.expandtabs()) for line in output.decode("utf-8", "replace").rstrip("\n").split("\n"))


class EscapingFormatter(logging.Formatter):
    """Escapes what is not printable, marks the further lines of a record, and cuts the end of a long one."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record)[:MAX_RECORD_CHARACTERS].split("\n")
        return f"\n{CONTINUATION}".join(_escape(line) for line in lines)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
