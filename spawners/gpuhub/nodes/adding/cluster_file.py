"""Nodes in cluster.toml: put in, changed and taken out, with the file's comments and order kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit.items import AoT, Comment, Table, Whitespace

from gpuhub import settings
from gpuhub.errors import NotFound, SettingsError
from gpuhub.settings import Cluster, Node

_ALL_KEYS = ("name", "address", "docker", "tls")


def describe(node: Node) -> dict[str, Any]:
    """What `gpuhub node add` says of a node."""
    keys: dict[str, Any] = {"name": node.name, "address": node.address, "docker": node.docker}
    if node.tls is not None:
        files = tomlkit.inline_table()
        files.update({"ca": str(node.tls.ca), "cert": str(node.tls.cert), "key": str(node.tls.key)})
        keys["tls"] = files
    return keys


def format_node(node: Node) -> str:
    """The [[nodes]] table that is put in."""
    return put_node("", node).strip()


def put_node(text: str, node: Node) -> str:
    """The file's text with this node: the table of that name changed, or one more after the last. Pure."""
    document = tomlkit.parse(text)
    tables = _nodes(document)
    keys = describe(node)
    for table in tables:
        if table.get("name") == node.name:
            tail = _cut_tail(table)
            for key in _ALL_KEYS:
                if key in keys:
                    table[key] = keys[key]
                elif key in table:
                    del table[key]
            _add_tail(table, tail)
            return tomlkit.dumps(document)
    fresh = tomlkit.table()
    for key, value in keys.items():
        fresh.add(key, value)
    if len(tables):
        _add_tail(fresh, _cut_tail(tables[-1]))
        tables[-1].add(tomlkit.nl())
    tables.append(fresh)
    return tomlkit.dumps(document)


def take_node(text: str, name: str) -> str:
    """The file's text without the node's table. Pure.

    Raises:
        NotFound: it has none.
    """
    document = tomlkit.parse(text)
    tables = _nodes(document)
    for place, table in enumerate(tables):
        if table.get("name") == name:
            if place > 0:
                # What stands below it is the heading of the next part.
                _cut_tail(tables[place - 1])
                _add_tail(tables[place - 1], _cut_tail(table))
            del tables[place]
            return tomlkit.dumps(document)
    raise NotFound(f"the file has no node {name!r}")


def check(text: str, file: Path) -> Cluster:
    """The settings that this text would be; nothing is written beside the file for longer than that takes.

    Raises:
        SettingsError: it is wrong.
    """
    trial = file.with_name(f".{file.name}.trial")
    trial.write_text(text, encoding="utf-8")
    try:
        return settings.load(trial)
    except SettingsError as error:
        raise SettingsError(str(error).replace(str(trial), str(file))) from None
    finally:
        trial.unlink()


def write(file: Path, text: str) -> Path:
    """Replace the file in one step; the copy of what it was before is returned."""
    file = file.resolve()
    before = file.with_name(f"{file.name}.before")
    shutil.copy2(file, before)
    fresh = file.with_name(f".{file.name}.fresh")
    with fresh.open("w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
    shutil.copymode(file, fresh)
    owner = file.stat()
    os.chown(fresh, owner.st_uid, owner.st_gid)
    fresh.replace(file)
    return before


def _nodes(document: tomlkit.TOMLDocument) -> AoT:
    if "nodes" not in document:
        document.append("nodes", tomlkit.aot())
    return cast(AoT, document["nodes"])


def _add_tail(table: Table, tail: Iterable[Comment | Whitespace]) -> None:
    for item in tail:
        table.add(item)


def _cut_tail(table: Table) -> list[Comment | Whitespace]:
    """What stands below a table's last key, from the first empty line on: mostly the heading of what comes next."""
    body = table.value.body
    begin = len(body)
    while begin and body[begin - 1][0] is None:
        begin -= 1
    while begin < len(body) and not isinstance(body[begin][1], Whitespace):
        begin += 1
    tail = [cast(Comment | Whitespace, item) for _, item in body[begin:]]
    del body[begin:]
    return tail
