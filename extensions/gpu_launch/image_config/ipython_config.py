"""Every kernel of the image has `%gpu_launch`, and keeps to its part of a GPU. Goes to /etc/ipython/."""

import os

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by traitlets

c.InteractiveShellApp.extensions.append("gpu_launch")
if os.environ.get("GPUHUB_GPU_MEMORY_CAP_MIB"):
    c.InteractiveShellApp.extensions.append("gpu_launch.common.memory_cap")
