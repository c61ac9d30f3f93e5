"""Whole characters, and nothing from a stop string on."""

from __future__ import annotations

import pytest

from gpu_launch.serving.text_stream import TextStream


def decode(tokens: list[int]) -> str:
    """Each token is a byte."""
    return bytes(tokens).decode(errors="replace")


def read(text: str | bytes, *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops)
    data = text.encode() if isinstance(text, str) else text
    return [*(stream.feed(byte) for byte in data), stream.finish()], stream


def test_characters_come_whole():
    parts, _ = read("aß€𝄞")
    assert parts == ["a", "", "ß", "", "", "€", "", "", "", "𝄞", ""]


def test_bytes_that_are_no_text_do_not_hold_back_forever():
    """Neither in the middle nor at the end."""
    parts, _ = read(b"\xf0" * 20 + b"ab")
    assert "".join(parts).endswith("ab")
    assert sum(bool(part) for part in parts) > 2
    assert read(b"a\xe2")[0] == ["a", "", "\ufffd"]


@pytest.mark.parametrize(("prompt", "text"), [(b"The capital is", " Paris, France"), (b"", "Paris, France")])
def test_continued_text_keeps_its_first_space(prompt, text):
    """Tokenizers of Llama leave out a space at the begin of what they decode."""
    stream = TextStream(lambda tokens: decode(tokens).removeprefix(" "), (), tuple(prompt))
    assert "".join(map(stream.feed, b" Paris, France")) + stream.finish() == text


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STO two", ("STOP",), "one STO two"),
        ("one STO", ("STOP",), "one STO"),
        ("aXbY", ("Y", "X"), "a"),
        ("ababac", ("abac",), "ab"),
        ("ends\n\nmore", ("\n\n",), "ends"),
    ],
)
def test_text_ends_before_a_stop_string(text, stops, expected):
    """What could begin one is held back until that is known."""
    parts, stream = read(text, *stops)
    assert "".join(parts) == expected
    assert stream.is_stopped == (expected != text)
    seen = ""
    for part in parts:
        seen += part
        assert expected.startswith(seen)
