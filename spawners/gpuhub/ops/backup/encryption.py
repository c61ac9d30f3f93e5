"""Encryption of a backup with a passphrase: AES-256-GCM in chunks, with a key from scrypt.

Each chunk's nonce has its number and whether it is the last one, so that chunks can be neither reordered nor cut off
unnoticed (the construction STREAM of Hoang, Reyhanitabar, Rogaway and Vizár, 2015).
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from gpuhub.common.errors import SettingsError

#: The first bytes of an encrypted backup.
MAGIC = b"gpuhub encrypted backup 1\n"
#: Shortest passphrase, characters.
MIN_PASSPHRASE = 12
_SALT, _PREFIX, _TAG = 16, 7, 16
_CHUNK = 64 << 10
#: Cost of a guess: 128 MiB and about half a second.
_SCRYPT_N = 2**17


def check_passphrase(passphrase: str) -> str:
    """Return the passphrase if it is long enough.

    Raises:
        SettingsError: It is shorter than `MIN_PASSPHRASE`.
    """
    if len(passphrase) < MIN_PASSPHRASE:
        raise SettingsError(
            f"the passphrase has {len(passphrase)} characters: at least {MIN_PASSPHRASE} are needed, such as four words"
        )
    return passphrase


class EncryptingWriter(io.RawIOBase):
    """Encrypts what is written to it; `close` writes the last chunk, and leaves the file open."""

    def __init__(self, file: BinaryIO, passphrase: str) -> None:
        super().__init__()
        salt, self._prefix = os.urandom(_SALT), os.urandom(_PREFIX)
        self._file, self._cipher = file, _build_cipher(passphrase, salt)
        self._number, self._pending = 0, bytearray()
        file.write(MAGIC + salt + self._prefix)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self._pending += data
        while len(self._pending) > _CHUNK:
            self._write_chunk(bytes(self._pending[:_CHUNK]), is_last=False)
            del self._pending[:_CHUNK]
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._write_chunk(bytes(self._pending), is_last=True)
        super().close()

    def _write_chunk(self, chunk: bytes, *, is_last: bool) -> None:
        self._file.write(self._cipher.encrypt(_build_nonce(self._prefix, self._number, is_last=is_last), chunk, MAGIC))
        self._number += 1


class DecryptingReader(io.RawIOBase):
    """Reads what an `EncryptingWriter` wrote, and nothing else."""

    def __init__(self, file: BinaryIO, passphrase: str) -> None:
        """Read the header; `file` is at its beginning."""
        super().__init__()
        header = file.read(len(MAGIC) + _SALT + _PREFIX)
        salt, self._prefix = header[len(MAGIC) : -_PREFIX], header[-_PREFIX:]
        self._file, self._cipher = file, _build_cipher(passphrase, salt)
        self._number, self._ready = 0, b""
        self._next = file.read(_CHUNK + _TAG)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray, /) -> int:  # type: ignore[override]
        if not self._ready and self._next:
            self._ready = self._read_chunk()
        part = self._ready[: len(buffer)]
        buffer[: len(part)] = part
        self._ready = self._ready[len(part) :]
        return len(part)

    def _read_chunk(self) -> bytes:
        chunk, self._next = self._next, self._file.read(_CHUNK + _TAG)
        nonce = _build_nonce(self._prefix, self._number, is_last=not self._next)
        try:
            plain = self._cipher.decrypt(nonce, chunk, MAGIC)
        except InvalidTag:
            reason = "the passphrase is wrong, or the file is damaged" if not self._number else "the file is damaged"
            raise SettingsError(f"the backup cannot be decrypted: {reason}") from None
        self._number += 1
        return plain


def _build_cipher(passphrase: str, salt: bytes) -> AESGCM:
    return AESGCM(Scrypt(salt=salt, length=32, n=_SCRYPT_N, r=8, p=1).derive(passphrase.encode()))


def _build_nonce(prefix: bytes, number: int, *, is_last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + bytes([is_last])
