"""Slurm's tokens (auth/jwt): who asks slurmrestd, signed with the key that slurm.conf names. Pure but for the key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from pathlib import Path

from gpuhub.errors import SetupError

#: Long enough for clocks that differ a little; a token is made for each request.
LIFETIME_S = 60
#: Tokens of clocks that are behind are taken too.
_SLACK_S = 30


@dataclass(frozen=True, slots=True)
class Key:
    """A key, which must not be shown."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Key:
        """The key in a file.

        Raises:
            SetupError: it cannot be read, or is empty.
        """
        try:
            secret = path.read_bytes()
        except OSError as error:
            raise SetupError(f"the key of Slurm's tokens can't be read: {path}: {error.strerror}") from error
        if not secret:
            raise SetupError(f"the key of Slurm's tokens is empty: {path}")
        return cls(secret)

    def mint(self, user: str, now: float) -> str:
        """A token with which slurmrestd acts for this user for a minute.

        Args:
            user: a name that slurmctld's machine knows.
            now: seconds since 1970.
        """
        # Slurm 22.05 wants exactly these three.
        claims = {"exp": int(now) + LIFETIME_S, "iat": int(now) - _SLACK_S, "sun": user}
        signed = b".".join(_encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        return b".".join((signed, _encode(hmac.digest(self.secret, signed, hashlib.sha256)))).decode()


def _encode(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")
