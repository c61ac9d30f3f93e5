"""TLS to the broker with this container's certificate."""

from __future__ import annotations

import ssl

from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError


def load_client_tls(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return TLS settings that trust the file `ca` alone and present `certificate` (PEM files).

    Raises:
        BrokerError: A file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = error.strerror or error
        raise BrokerError(
            f"This server's certificates cannot be read ({reason}): stop it and start it again."
        ) from None
    return context


def load_own_tls(env: Environment) -> ssl.SSLContext | None:
    """Return the TLS settings of this container; None for a broker without TLS.

    Raises:
        BrokerError: A file cannot be read.
    """
    return load_client_tls(env.broker_ca, env.certificate, env.key) if env.broker_ca else None
