"""What the hub must still know of a notebook's job when the hub was restarted in the middle of its start.

JupyterHub forgets a start that had not ended, and makes a new token for the next one; the job in Slurm's queue has the
first token in its script, and keeps its place only if that token opens the hub again. The broker keeps leases, and is
told no tokens: so they are here, a file for each lease, root's (or the hub's user's) alone.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuhub.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One lease's job."""

    token: str
    #: None until it is submitted.
    job: int | None = None
    #: Where the notebook listens; None until it is reported.
    port: int | None = None


class Records:
    """A folder of records; it is made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, lease_id: str) -> Record | None:
        """What is known of the lease's job."""
        try:
            text = self._file(lease_id).read_text(encoding="utf-8")
            return Record(**json.loads(text))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            # Half a file from a machine that went down: its job is not gone on with.
            return None

    def put(self, lease_id: str, record: Record) -> None:
        """Know this from now on, also after a crash."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(lease_id)
        temporary = file.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            json.dump(asdict(record), out)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)

    def drop(self, lease_id: str) -> None:
        """Forget it."""
        self._file(lease_id).unlink(missing_ok=True)

    def _file(self, lease_id: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", lease_id):
            raise InvalidRequest(f"{lease_id[:80]!r} is no lease")
        return self._folder / f"{lease_id}.json"
