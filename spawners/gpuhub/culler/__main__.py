"""The culler's process, which the hub starts as a service: `python -m gpuhub.culler`.

It reads `GPUHUB_BROKER_URL` and, with internal TLS, `GPUHUB_INTERNAL_CERTIFICATES`: the folder of the certificates.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from jupyterhub_idle_culler import IdleCuller

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.culler.arbiter import Arbiter
from gpuhub.tls.internal_certificates import CertificateStore

#: Interval at which the culler asks about each notebook, seconds.
CHECK_PERIOD_S = 10
#: Time limit of a call to the broker, after which the notebook is asked about again in the next round, seconds.
_RETRY_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run jupyterhub-idle-culler with the broker as its arbiter, until the hub ends."""
    # A hub that was killed cannot end its services, and its next run starts another culler.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    certificates = os.environ.get("GPUHUB_INTERNAL_CERTIFICATES", "")
    broker = AsyncBrokerClient(
        os.environ["GPUHUB_BROKER_URL"],
        os.environ["JUPYTERHUB_API_TOKEN"],
        retry_limit_s=_RETRY_LIMIT_S,
        tls=CertificateStore(Path(certificates)).build_broker_context() if certificates else None,
    )
    IdleCuller.launch_instance(
        [],
        config_file="",
        cull_every=CHECK_PERIOD_S,
        cull_arbiter_hook=Arbiter(broker).decide,
        ssl_enabled=bool(certificates),
        internal_certs_location=certificates,
    )


if __name__ == "__main__":
    main()
