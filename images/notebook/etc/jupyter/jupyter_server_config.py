"""Jupyter Server's settings for every user of this image. The hub has it ignore what is in a home
(`disable_user_config`), so that another machine's settings there, or a planted file, do not change who may use the
server. JupyterLab's own settings in a home count.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager

c = get_config()  # noqa: F821


class KernelSpecs(KernelSpecManager):
    """With the user's own kernels (`python -m ipykernel install --user`): they are no settings of the server's."""

    def _kernel_dirs_default(self) -> list[str]:
        return [*super()._kernel_dirs_default(), self.user_kernel_dir]


c.ServerApp.kernel_spec_manager_class = KernelSpecs
# JupyterHub makes its own cookies so; this is Jupyter Server's one against forged requests.
cookies = json.loads(os.environ.get("JUPYTERHUB_COOKIE_OPTIONS") or "{}")
prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/")
c.ServerApp.tornado_settings = {"xsrf_cookie_kwargs": {**cookies, "path": prefix}}
# The hub has JupyterLab's files, for all users under one address. Its files are those of this image if their main file
# has the same hash; another image keeps to its own.
lab_url = os.environ.get("GPUHUB_LAB_URL", "")
if lab_url and Path(sys.prefix, "share/jupyter/lab/static", f"main.{lab_url.rpartition('/')[2]}.js").exists():
    c.ServerApp.tornado_settings["page_config_data"] = {"fullStaticUrl": lab_url}

c.Application.log_level = "WARN"
c.ServerApp.allow_root = False
c.ServerApp.default_url = "/lab"
c.LabApp.extension_manager = "readonly"
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.news_url = None
# The first two cost time at every start: no language server is in the image, and ipyparallel's panel for clusters is
# not the way to GPUs here.
c.ServerApp.jpserver_extensions = {
    "ipyparallel": False,
    "jupyter_lsp": False,
    # Servers of the notebook's own container, for its user: /proxy/PORT/.
    "jupyter_server_proxy": True,
    # Lets the user in by SSH.
    "gpu_launch.sshd.jupyter_extension": True,
    # Tells the broker whether the notebook is idle, and JupyterLab when it will be stopped.
    "gpu_launch.notebook_server.extension": True,
    # Has JupyterLab load its extensions from the hub.
    "gpu_launch.notebook_server.lab_extensions": True,
}

# The examples, for a newcomer to find; a file that is there, changed or not, stays as it is.
examples = Path("/opt/gpuhub/share/gpuhub-examples")
try:
    mine = Path.home() / "gpuhub-examples"
    mine.mkdir(exist_ok=True)
    for file in examples.rglob("*.ipynb"):
        copy = mine / file.relative_to(examples)
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
except OSError as error:
    print(f"the examples are not copied: {error}")  # noqa: T201 - into the container's log; no reason not to start

# Where `%tensorboard` shows its page: behind this server's address, in place of the container's port.
os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{prefix}proxy/%PORT%/")
# Programs that a user installed with pip are found in kernels too.
os.environ["PATH"] += os.pathsep + str(Path.home() / ".local" / "bin")
