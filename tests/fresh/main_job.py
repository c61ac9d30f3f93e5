"""The main job over the hub's API, on the hub that `make up` has started: a notebook with a GPU, from login to its end.

Needs nothing but what `make up` installs. Exits with an error where a step fails.
"""

from __future__ import annotations

import sys

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import log_in
from tests.support.product import wait_for

ADDRESS = "127.0.0.1:8000"
#: The profile of the second node: its daemon is another one than that of the first.
PROFILE = "rtx5070"
SERVER = "fresh"


def main() -> None:
    """Log in, start a notebook, ask it for its GPU, stop it, and see that the GPU is free.

    Raises:
        SystemExit: A step failed.
    """
    user = log_in(f"http://{ADDRESS}", "ada", secrets.read_secret(Paths(), secrets.USER_PASSWORD))
    try:
        user.start(SERVER, PROFILE)
        wait_for(lambda: user.is_ready(SERVER), "the notebook is ready", deadline_s=300)
        with open_kernel(ADDRESS, user, SERVER) as kernel:
            listed = kernel.run("!nvidia-smi -L")
        user.stop(SERVER)
        wait_for(lambda: are_free(user.ask(user.broker, "GET", "/cluster")[1]), "all GPUs are free", deadline_s=120)
    finally:
        user.close()
    if "RTX 5070" not in listed:
        sys.exit(f"the notebook has no RTX 5070; `nvidia-smi -L` there: {listed}")
    sys.stdout.write(f"The notebook had {listed.strip()}; its GPU is free again.\n")


def are_free(view: dict[str, list[dict[str, list[dict[str, str]]]]]) -> bool:
    """Return whether every GPU of the cluster is free."""
    return all(gpu["state"] == "free" for node in view["nodes"] for gpu in node["gpus"])


if __name__ == "__main__":
    main()
