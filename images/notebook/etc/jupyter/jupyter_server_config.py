"""Jupyter Server's settings for every user of this image; ~/.jupyter adds to them."""

import os
from pathlib import Path

c = get_config()  # noqa: F821

c.Application.log_level = "WARN"
c.ServerApp.allow_root = False
c.ServerApp.default_url = "/lab"
c.LabApp.extension_manager = "readonly"
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.news_url = None
# These cost time at every start: no language server is in the image, and ipyparallel's panel for clusters is not the
# way to GPUs here (its part in the browser is switched off in labconfig/).
c.ServerApp.jpserver_extensions = {"ipyparallel": False, "jupyter_lsp": False}

# Programs that a user installed with pip are found in kernels too.
os.environ["PATH"] += os.pathsep + str(Path.home() / ".local" / "bin")
