"""The main job over the hub's API, on the hub that `make up` has started: a notebook with a GPU, from login to its end.

Needs nothing but what `make up` installs. Exits with an error where a step fails.
"""

from __future__ import annotations

import argparse
import sys

from gpuhub.common import secrets
from gpuhub.common.paths import DEFAULT_INSTANCE, Paths
from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import log_in
from tests.support.product import wait_for

ADDRESS = "127.0.0.1:8000"
#: The profile of the practice closet's second node: its daemon is another one than that of the first.
PROFILE = "rtx5070"
SERVER = "fresh"


def main() -> None:
    """Log in, start a notebook, ask it for its GPUs, stop it, and see that all GPUs are free.

    Raises:
        SystemExit: A step failed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--instance", default=DEFAULT_INSTANCE)
    options = parser.parse_args()
    password = secrets.read_secret(Paths(options.instance), secrets.USER_PASSWORD)
    user = log_in(f"http://{ADDRESS}", "ada", password)
    try:
        user.start(SERVER, options.profile)
        wait_for(lambda: user.is_ready(SERVER), "the notebook is ready", deadline_s=300)
        held = [gpu["uuid"] for gpu in user.gpus() if gpu["state"] == "held"]
        with open_kernel(ADDRESS, user, SERVER) as kernel:
            listed = kernel.run("!nvidia-smi -L")
        user.stop(SERVER)
        wait_for(lambda: all(gpu["state"] == "free" for gpu in user.gpus()), "all GPUs are free", deadline_s=120)
    finally:
        user.close()
    if not held or not all(uuid in listed for uuid in held):
        sys.exit(f"the notebook holds {held or 'no GPU'}, but `nvidia-smi -L` there says: {listed}")
    sys.stdout.write(f"The notebook had {listed.strip()}; its GPU is free again.\n")


if __name__ == "__main__":
    main()
