"""`gpuhub doctor --bundle`: what a bug report needs in one archive, without secrets.

Secrets that gpuhub knows are replaced wherever they appear, and so is text that looks like one: logs should have none,
but an archive that leaves the machine must not depend on that. Of cluster.toml, neither comments nor values that may be
secrets are in the archive.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import tomlkit

from gpuhub.broker.db.engine import READ_ONLY, build_engine, find_revision
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_database_url
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.doctor.findings import Finding, build_json, format_findings

#: The last bytes of each log, and of all logs together.
MAX_LOG_BYTES = 2 << 20
MAX_LOGS_BYTES = 20 << 20
#: Replacement of a secret.
REMOVED = "[removed]"
#: Secrets shorter than this are replaced only where they stand alone.
_LONG_SECRET = 8
#: Secrets shorter than this are not replaced: they would be found in words.
_LEAST_SECRET = 4
#: Keys of cluster.toml with lists of NAME=VALUE, and with commands, whose arguments may be secrets.
_VARIABLES, _COMMANDS = frozenset({"environment", "variables"}), frozenset({"command", "on", "off"})
#: Parts of names whose values are secrets, and keys of cluster.toml with such a name and another value.
_SENSITIVE_NAME = (
    r"(?:secret|password|passwd|passphrase|token|cookie|credential|_xsrf|api-?key|[_-](?:key|pass|pwd)|\b(?:pass|pwd))"
)
_NO_SECRETS = r"longest_token|rest_key"
_LOOKS_SECRET = (
    # Keys and certificates.
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL), REMOVED),
    # Headers, URLs and settings: `Authorization: token …`, `?code=…`, `client_secret = "…"`, `https://user:password@`.
    (re.compile(r"(?i)\b((?:set-)?cookie|authorization)(\s*:\s*)[^\s\"'][^\r\n\"']*"), rf"\1\2{REMOVED}"),
    (re.compile(r"(?i)\b(bearer|token|basic)(\s+)[A-Za-z0-9+/=._~-]{16,}"), rf"\1\2{REMOVED}"),
    (
        re.compile(
            rf"(?i)(?<![\w.-])((?!{_NO_SECRETS})[\w.-]*{_SENSITIVE_NAME}[\w.-]*(?<!_file)\\?[\"']?\s*[=:]\s*)"
            r"(?:(\\?[\"']).*?\2|[^\s\"'&]+)"
        ),
        rf"\1\2{REMOVED}\2",
    ),
    (re.compile(r"([?&](?:code|state)=)[^&\s]+"), rf"\1{REMOVED}"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s]+@"), rf"\1{REMOVED}@"),
    (re.compile(r"(https?://)[^/\s:@]+@"), rf"\1{REMOVED}@"),
)


def write_bundle(
    file: Path,
    cluster: ClusterSettings,
    cluster_file: Path,
    paths: Paths,
    machines: Sequence[tuple[str, Sequence[Finding]]],
) -> list[str]:
    """Write the archive, readable only by its owner; return the names of its members.

    Args:
        machines: What the doctor found.

    Raises:
        SetupError: The file exists, or cannot be written.
    """
    secrets = find_secrets(cluster, paths)
    texts = {name: remove_secrets(text, secrets) for name, text in _collect(cluster, cluster_file, paths, machines)}
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SetupError(f"{file} exists: name another file, or remove it") from None
    except OSError as error:
        raise SetupError(f"{file} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in texts.items():
            content = text.encode()
            member = tarfile.TarInfo(f"gpuhub-bundle/{name}")
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    return list(texts)


def find_secrets(cluster: ClusterSettings, paths: Paths) -> frozenset[str]:
    """Return the lines of all files with secrets, gpuhub's own and those that cluster.toml names, and the values of
    variables in cluster.toml.
    """
    settings = cluster.model_dump()
    files = [path for path in (*paths.secrets.rglob("*"), *_find_secret_files(settings)) if path.is_file()]
    lines = {line.strip() for path in files for line in path.read_text(encoding="utf-8", errors="replace").splitlines()}
    # A log may have a part of a notification's destination, such as tgram://TOKEN/CHAT.
    parts = {part for line in lines if "://" in line for part in re.split(r"[/:@?&=]+", line)}
    values = {
        variable.partition("=")[2]
        for service in cluster.services
        for variable in service.environment + service.variables
    }
    return frozenset(
        [
            *(line for line in lines if len(line) >= _LEAST_SECRET and not line.startswith(("-----", "#"))),
            *(text for text in parts | values if len(text) >= _LONG_SECRET),
        ]
    )


def _find_secret_files(value: Any, key: str = "") -> Iterator[Path]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _find_secret_files(part, str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_secret_files(part, key)
    elif isinstance(value, Path) and re.search(r"secret|password|token|key|_file$", key):
        yield value


def remove_secrets(text: str, secrets: frozenset[str]) -> str:
    """Return a text without these secrets, and without what looks like one."""
    # The longest first: one may be part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LONG_SECRET:
            text = text.replace(secret, REMOVED)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REMOVED, text)
    for pattern, replacement in _LOOKS_SECRET:
        text = pattern.sub(replacement, text)
    return text


def _format_settings(file: Path) -> str:
    """Return the settings in a cluster.toml, without comments, values of variables, and arguments of commands."""
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8", errors="replace"))
    except tomllib.TOMLDecodeError as error:
        return f"not TOML: {error}"
    return tomlkit.dumps(_hide_values(settings))


def _hide_values(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: REMOVED if key in _VARIABLES else _hide_values(part, name) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    if key in _VARIABLES:
        return [f"{str(part).partition('=')[0]}={REMOVED}" for part in value]
    return [*value[:1], REMOVED] if key in _COMMANDS else [_hide_values(part, key) for part in value]


def _collect(
    cluster: ClusterSettings, cluster_file: Path, paths: Paths, machines: Sequence[tuple[str, Sequence[Finding]]]
) -> Iterator[tuple[str, str]]:
    findings = [f"{name}\n{format_findings(found)}\n" for name, found in machines]
    yield "doctor.txt", "\n".join(findings)
    yield "doctor.json", json.dumps(build_json(machines), indent=2, ensure_ascii=False)
    yield "versions.txt", _describe_versions()
    yield "broker.json", json.dumps(_count_rows(cluster.database, paths), indent=2)
    for file in dict.fromkeys((cluster_file, paths.used_cluster_file)):
        if file.is_file():
            yield file.name, _format_settings(file)
    left = MAX_LOGS_BYTES
    for log in sorted(paths.log.glob("*.log")):
        content = _read_end(log, min(MAX_LOG_BYTES, left))
        left -= len(content)
        yield f"logs/{log.name}", content.decode(errors="replace")


def _describe_versions() -> str:
    packages = sorted(f"{package.name} {package.version}" for package in importlib.metadata.distributions())
    release = Path("/etc/os-release")
    system = release.read_text(encoding="utf-8") if release.exists() else ""
    kernel = os.uname()
    return "\n".join(
        (
            f"{kernel.sysname} {kernel.release} {kernel.machine}",
            f"Python {platform.python_version()}",
            system,
            *packages,
            "",
        )
    )


def _count_rows(database: DatabaseSettings, paths: Paths) -> dict[str, Any]:
    """Return the schema's revision and the number of rows of each table, or why they cannot be read."""
    try:
        engine = build_engine(build_database_url(database, paths, "broker"))
        try:
            with closing(engine.connect().execution_options(**READ_ONLY)) as connection:
                names = sa.inspect(connection).get_table_names()
                rows = {
                    name: connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar_one()
                    for name in names
                }
                return {"revision": find_revision(connection), "rows": rows}
        finally:
            engine.dispose()
    except (sa.exc.SQLAlchemyError, SetupError) as error:
        return {"error": str(getattr(error, "orig", None) or error)}


def _read_end(file: Path, size: int) -> bytes:
    with file.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(log.tell() - size, 0))
        return log.read(size)
