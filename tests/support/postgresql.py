"""A PostgreSQL server of the tests: Debian's, with data in a folder of its own and a role with a password."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.config.database import DatabaseSettings
from tests.support.product import wait_for

#: PostgreSQL's own file of passwords gives `:` and `\` a meaning, and URLs give one to `%`.
PASSWORD = r"p:a\ss%40 word"
_ROLE = "gpuhub"
#: It refuses to run as root.
_USER: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []}


@dataclass(slots=True)
class PostgresqlServer:
    """The server; every test makes a database of its own."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it answers."""
        command = [
            str(find_program("postgres")),
            "-D",
            str(self.folder / "data"),
            "-p",
            str(self.port),
            "-k",
            str(self.folder),
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **_USER)
        ready = [str(find_program("pg_isready")), "-q", "-h", str(self.folder), "-p", str(self.port)]
        wait_for(lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL answers", 30)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it, and break off the connections: SIGINT is PostgreSQL's fast shutdown."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None

    def create_database(self, name: str) -> str:
        """Create an empty database of the role, and return its URL, without the password."""
        self.run_sql(f'CREATE DATABASE "{name}" OWNER {_ROLE}')
        return f"postgresql://{_ROLE}@127.0.0.1:{self.port}/{name}"

    def run_sql(self, text: str) -> str:
        """Run a statement as the server's administrator, and return its output."""
        psql = [
            str(find_program("psql")),
            "-AtX",
            "-h",
            str(self.folder),
            "-p",
            str(self.port),
            "-d",
            "postgres",
            "-c",
            text,
        ]
        done = subprocess.run(psql, capture_output=True, text=True, check=False, cwd=self.folder, **_USER)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def build_settings(self, name: str, folder: Path) -> DatabaseSettings:
        """Create a database, and return the table of cluster.toml that names it."""
        file = folder / "postgresql-password"
        file.write_text(f"{PASSWORD}\n")
        file.chmod(0o600)
        return DatabaseSettings(url=self.create_database(name), password_file=file)


def find_program(name: str) -> Path:
    """Return a program of the newest PostgreSQL that Debian installed, which has most of them outside of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    assert found, f"{name} is missing: `spawners/setup.sh dev` installs it"
    return found[-1]


@contextmanager
def run_postgresql() -> Iterator[PostgresqlServer]:
    """Run a server as Debian's user `postgres`, which needs root; it listens on loopback only, and asks for passwords."""
    # Not in pytest's folder, which other users than root cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="gpuhub-postgresql-", dir="/tmp"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    account = pwd.getpwnam("postgres")
    os.chown(folder, account.pw_uid, account.pw_gid)
    server = PostgresqlServer(folder=folder, port=port)
    try:
        initdb = [
            str(find_program("initdb")),
            "--no-sync",
            "--auth-local=peer",
            "--auth-host=scram-sha-256",
            "-E",
            "UTF8",
        ]
        locale = ["--locale=C.UTF-8", "-D", str(folder / "data")]
        subprocess.run([*initdb, *locale], check=True, stdout=subprocess.DEVNULL, cwd=folder, **_USER)
        with (folder / "data/postgresql.conf").open("a") as settings:
            # What is tested is not the disk.
            settings.write("listen_addresses = '127.0.0.1'\nfsync = off\nmax_connections = 60\n")
        server.start()
        server.run_sql(f"CREATE ROLE {_ROLE} LOGIN PASSWORD E'{PASSWORD.replace(chr(92), chr(92) * 2)}'")
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
