"""Pages of jobs' servers get a script at the beginning of their head."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from gpuhub.broker.ports.pages import add_storage, is_page

TAG = '<script src="/s.js"></script>'


async def cut(text: str, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size].encode()


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("page", "changed"),
    [
        ("<!doctype html><html><HEAD lang=en><p>", f"<!doctype html><html><HEAD lang=en>{TAG}<p>"),
        ("<!doctype html><p>x<header>", f"<!doctype html>{TAG}<p>x<header>"),
        ("<html lang=en><p>", f"<html lang=en>{TAG}<p>"),
        ("<p>part of a page", "<p>part of a page"),
        ("", ""),
        ("<p>" + "x" * 40_000 + "<head>", "<p>" + "x" * 40_000 + "<head>"),
    ],
)
async def test_script_is_added_where_the_head_begins(page: str, changed: str, size: int) -> None:
    """However the page arrives; parts of pages stay as they are."""
    assert b"".join([part async for part in add_storage(cut(page, size), "/s.js")]).decode() == changed


@pytest.mark.parametrize("size", [64, 65536])
@pytest.mark.parametrize("text", ["<head ", "<html ", "<!doctype ", " ", "<head\n"])
async def test_search_takes_little_time_whatever_the_page_has(text: str, size: int) -> None:
    """A job's server may send any page, in any parts, to the broker that serves everybody."""
    page = cut(text * (128 * 1024 // len(text)), size)
    began = time.thread_time()
    assert len([part async for part in add_storage(page, "/s.js")]) > 0
    assert time.thread_time() - began < 0.5


def test_only_readable_pages_are_changed() -> None:
    """Other types, and compressed ones, pass."""
    page = (b"Content-Type", b"text/html; charset=utf-8")
    assert is_page([page])
    assert is_page([page, (b"Content-Encoding", b"identity")])
    assert not is_page([page, (b"Content-Encoding", b"gzip")])
    assert not is_page([(b"Content-Type", b"text/plain")])
