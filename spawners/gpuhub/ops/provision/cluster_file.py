"""Changes of the nodes in cluster.toml, which keep the file's comments and order."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit.items import AoT, Comment, Table, Whitespace

from gpuhub.common import files
from gpuhub.common.errors import NotFound, SettingsError
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings, NodeSettings

_ALL_KEYS = ("name", "address", "docker", "tls", "guest")


def build_node_table(node: NodeSettings) -> dict[str, Any]:
    """Return the keys that `gpuhub node add` writes for a node."""
    keys: dict[str, Any] = {"name": node.name, "address": node.address, "docker": node.docker}
    if node.data_interface is not None:
        keys["data_interface"] = node.data_interface
    if node.guest:
        keys["guest"] = True
    if node.tls is not None:
        tls = tomlkit.inline_table()
        tls.update({"ca": str(node.tls.ca), "cert": str(node.tls.cert), "key": str(node.tls.key)})
        keys["tls"] = tls
    return keys


def format_node(node: NodeSettings) -> str:
    """Return the text of the node's [[nodes]] table."""
    return put_node("", node).strip()


def put_node(text: str, node: NodeSettings) -> str:
    """Return the file's text with this node: in the table of its name, or in a new one after the last."""
    document = tomlkit.parse(text)
    tables = _nodes(document)
    keys = build_node_table(node)
    for table in tables:
        if table.get("name") == node.name:
            tail = _cut_tail(table)
            for key in _ALL_KEYS:
                if key in table and key not in keys:
                    del table[key]
            table.update(keys)
            _add_tail(table, tail)
            return tomlkit.dumps(document)
    new_table = tomlkit.table()
    for key, value in keys.items():
        new_table.add(key, value)
    if len(tables):
        _add_tail(new_table, _cut_tail(tables[-1]))
        tables[-1].add(tomlkit.nl())
    tables.append(new_table)
    return tomlkit.dumps(document)


def remove_node(text: str, name: str) -> str:
    """Return the file's text without the node's table.

    Raises:
        NotFound: It has no such table.
    """
    document = tomlkit.parse(text)
    tables = _nodes(document)
    for index, table in enumerate(tables):
        if table.get("name") == name:
            if index > 0:
                # The text below it is the heading of the next part.
                _cut_tail(tables[index - 1])
                _add_tail(tables[index - 1], _cut_tail(table))
            del tables[index]
            return tomlkit.dumps(document)
    raise NotFound(f"the file has no node {name!r}")


def check_text(text: str, file: Path) -> ClusterSettings:
    """Return the settings in this text; a temporary file next to the file is needed for that.

    Raises:
        SettingsError: The settings are not valid.
    """
    trial = file.with_name(f".{file.name}.trial")
    trial.write_text(text, encoding="utf-8")
    try:
        return settings.load(trial)
    except SettingsError as error:
        raise SettingsError(str(error).replace(str(trial), str(file))) from None
    finally:
        trial.unlink()


def replace_file(file: Path, text: str) -> Path:
    """Replace the file in one step, and return the copy of the previous file."""
    file = file.resolve()
    previous = file.with_name(f"{file.name}.before")
    shutil.copy2(file, previous)
    status = file.stat()
    files.replace_file(file, text, mode=stat.S_IMODE(status.st_mode), owner=(status.st_uid, status.st_gid))
    return previous


def _nodes(document: tomlkit.TOMLDocument) -> AoT:
    """Return the file's `[[nodes]]`, which may be none yet.

    Raises:
        SettingsError: The nodes are written in another form.
    """
    if "nodes" not in document:
        document.append("nodes", tomlkit.aot())
    tables = document["nodes"]
    if not isinstance(tables, AoT):
        raise SettingsError("cluster.toml has its nodes as `nodes = [{…}]`: write a table [[nodes]] for each")
    return tables


def _add_tail(table: Table, tail: Iterable[Comment | Whitespace]) -> None:
    for item in tail:
        table.add(item)


def _cut_tail(table: Table) -> list[Comment | Whitespace]:
    """Cut and return the text below a table's last key, from the first empty line on: the heading of the next part."""
    body = table.value.body
    begin = len(body)
    while begin and body[begin - 1][0] is None:
        begin -= 1
    while begin < len(body) and not isinstance(body[begin][1], Whitespace):
        begin += 1
    tail = [cast(Comment | Whitespace, item) for _, item in body[begin:]]
    del body[begin:]
    return tail
