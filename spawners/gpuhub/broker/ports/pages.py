"""HTML pages of jobs' servers: they get a memory in place of the storage that browsers refuse to sandboxed pages.

Many programs read `localStorage` or `document.cookie` at their start, and end with an error where that is refused.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from gpuhub.broker.ports.headers import Headers

#: Bytes at the beginning of a page in which its head begins; further on, nothing is searched.
_MAX_SEARCHED = 16 * 1024
#: Does not match `<` in an attribute: a page of `<head <head <head …` would be searched from each of them to its end.
_HEAD = re.compile(rb"<head(\s[^<>]*)?>", re.IGNORECASE)
#: Beginning of the head of a page that does not name it.
_BEGINNING = re.compile(rb"<html(\s[^<>]*)?>|\A\s*<!doctype\s[^<>]*>", re.IGNORECASE)
#: A file and no part of the page, because a server's own policy may forbid scripts within pages.
STORAGE_SCRIPT = b"""\
for (const name of ["localStorage", "sessionStorage"]) {
  const items = new Map();
  Object.defineProperty(window, name, {configurable: true, value: {
    getItem: (key) => items.get(String(key)) ?? null,
    setItem: (key, value) => { items.set(String(key), String(value)); },
    removeItem: (key) => { items.delete(String(key)); },
    clear: () => { items.clear(); },
    key: (index) => [...items.keys()][index] ?? null,
    get length() { return items.size; },
  }});
}
Object.defineProperty(document, "cookie", {configurable: true, get: () => "", set: () => {}});
// Workers from files are refused as well: without this, programs draw in the page itself.
delete window.OffscreenCanvas;
"""


def is_page(headers: Headers) -> bool:
    """Return whether a response is HTML that can be read."""
    values = {name.lower(): value.lower() for name, value in headers}
    is_readable = values.get(b"content-encoding", b"identity") == b"identity"
    return is_readable and values.get(b"content-type", b"").startswith(b"text/html")


def remove_length(headers: Headers) -> Headers:
    """Return the headers of a page that becomes longer."""
    return [(name, value) for name, value in headers if name.lower() != b"content-length"]


async def add_storage(parts: AsyncIterator[bytes], script: str) -> AsyncIterator[bytes]:
    """Yield a page with the script at this path at the beginning of its head."""
    tag = f'<script src="{script}"></script>'.encode()
    beginning = b""
    is_searched = False
    async for part in parts:
        if is_searched:
            yield part
            continue
        beginning += part
        head = _HEAD.search(beginning, 0, _MAX_SEARCHED)
        is_searched = head is not None or len(beginning) > _MAX_SEARCHED
        if is_searched:
            yield _insert(tag, beginning, head)
    if not is_searched:
        yield _insert(tag, beginning, None)


def _insert(tag: bytes, beginning: bytes, head: re.Match[bytes] | None) -> bytes:
    places = [head] if head is not None else list(_BEGINNING.finditer(beginning, 0, _MAX_SEARCHED))
    if not places:
        return beginning
    end = places[-1].end()
    return beginning[:end] + tag + beginning[end:]
