"""The exports of a head node that serves homes, datasets and models itself: texts for the kernel's server, ganesha and
for the packet filter.

Only nodes may mount them, with root as nobody (root_squash).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuhub.config.machines.storage import nfs_port
from gpuhub.config.settings import ClusterSettings

#: First line of files that gpuhub writes, and that it therefore may replace or remove.
MARKER = "# Written by gpuhub ([storage] serve in cluster.toml): changes are lost."


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A folder that nodes may mount."""

    #: Path of the folder on the head node, and for nodes.
    folder: str
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportList:
    """What the head node exports, and to whom."""

    exports: tuple[Export, ...]
    #: Addresses of the nodes.
    clients: tuple[str, ...]
    port: int


def find_exports(cluster: ClusterSettings) -> ExportList:
    """Return the exports of the settings; none unless `storage.serve` is set."""
    storage = cluster.storage
    folders = [(storage.home, True), *((source, False) for source in storage.list_read_only())] if storage.serve else []
    return ExportList(
        exports=tuple(
            Export(folder=find_exported_folder(source), is_writable=is_writable) for source, is_writable in folders
        ),
        clients=tuple(sorted({node.address for node in cluster.own_nodes}, key=_sort_key)),
        port=nfs_port(storage.nfs_options),
    )


def find_exported_folder(source: str) -> str:
    """Return the folder of `nfs://server/path`, which for homes is the one with all of them."""
    return urlsplit(source).path.partition("{username}")[0].rstrip("/") or "/"


def format_exports_file(exports: ExportList) -> str:
    """Return the text for `/etc/exports.d`, see exports(5)."""
    lines = [MARKER]
    for export in exports.exports:
        options = f"{'rw' if export.is_writable else 'ro'},sync,no_subtree_check,root_squash,sec=sys"
        lines.append(" ".join([f'"{export.folder}"', *(f"{client}({options})" for client in exports.clients)]))
    return "\n".join(lines) + "\n"


def format_ganesha_config(exports: ExportList, *, state: Path, bind: str) -> str:
    """Return nfs-ganesha's configuration, for a kernel without a server of its own.

    Args:
        state: Folder for what the server remembers over a restart.
        bind: The head node's address.
    """
    blocks = [
        MARKER,
        f"NFS_CORE_PARAM {{\n  Bind_addr = {bind};\n  NFS_Port = {exports.port};\n  Protocols = 4;\n"
        "  Enable_NLM = false;\n  Enable_RQUOTA = false;\n  Enable_UDP = false;\n}",
        # Names would need idmapd and the same accounts everywhere.
        f"NFSv4 {{\n  RecoveryBackend = fs;\n  RecoveryRoot = {state};\n  Only_Numeric_Owners = true;\n"
        "  Grace_Period = 20;\n  Lease_Lifetime = 20;\n}",
    ]
    for number, export in enumerate(exports.exports, start=1):
        access = "RW" if export.is_writable else "RO"
        blocks.append(
            f"EXPORT {{\n  Export_Id = {number};\n  Path = {export.folder};\n  Pseudo = {export.folder};\n"
            "  Protocols = 4;\n  Transports = TCP;\n  SecType = sys;\n  Access_Type = NONE;\n  Squash = Root_Squash;\n"
            "  FSAL { Name = VFS; }\n"
            f"  CLIENT {{\n    Clients = {', '.join(exports.clients)};\n    Access_Type = {access};\n"
            "    Squash = Root_Squash;\n  }\n}"
        )
    return "\n".join(blocks) + "\n"


def build_table_name(instance: str) -> str:
    """Return the name of the head node's nftables table."""
    return f"gpuhub_{instance}_storage"


def format_firewall(exports: ExportList, instance: str) -> str:
    """Return the script for `nft -f` that lets nodes alone reach the server; without exports it removes the table."""
    table = build_table_name(instance)
    removal = f"table inet {table}\ndelete table inet {table}\n"
    if not exports.exports:
        return removal
    rules = ['iif "lo" accept']
    for version, family in ((4, "ip"), (6, "ip6")):
        clients = [client for client in exports.clients if ipaddress.ip_address(client).version == version]
        if clients:
            rules.append(f"{family} saddr {{ {', '.join(clients)} }} accept")
    lines = [
        "type filter hook input priority filter - 5; policy accept;",
        *(f"tcp dport {exports.port} {rule}" for rule in (*rules, "counter drop")),
    ]
    body = "\n".join(f"\t\t{line}" for line in lines)
    return f"{removal}table inet {table} {{\n\tchain input {{\n{body}\n\t}}\n}}\n"


def _sort_key(address: str) -> tuple[int, int]:
    parsed = ipaddress.ip_address(address)
    return parsed.version, int(parsed)


def list_folders(exports: ExportList) -> Sequence[Path]:
    """Return the folders that must exist on the head node."""
    return [Path(export.folder) for export in exports.exports]
