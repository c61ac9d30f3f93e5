"""Encryption of users' destinations in the store: their URLs have passwords and tokens."""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet, InvalidToken

from gpuhub.common.errors import Conflict


class UrlCipher:
    """Encrypts with a key that is not in the store, so that a copy of the store has no password."""

    def __init__(self, secret: str) -> None:
        """`secret` is the text of a file of the head node's secrets."""
        self._fernet = Fernet(base64.urlsafe_b64encode(hashlib.sha256(secret.encode()).digest()))

    def encrypt(self, url: str) -> str:
        return self._fernet.encrypt(url.encode()).decode("ascii")

    def decrypt(self, text: str) -> str:
        """Return the URL.

        Raises:
            Conflict: It was encrypted with another key.
        """
        try:
            return self._fernet.decrypt(text.encode("ascii")).decode()
        except InvalidToken:
            raise Conflict("the head node's key was replaced: remove this destination and add it again") from None
