"""The notebook image's settings of Jupyter Server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "images" / "notebook" / "etc" / "jupyter" / "jupyter_server_config.py"
PROGRAM = """
import os, sys
from traitlets.config.loader import PyFileConfigLoader
PyFileConfigLoader(sys.argv[1]).load_config()
print(os.environ["TENSORBOARD_PROXY_URL"])
"""


@pytest.mark.process
def test_tensorboard_is_shown_behind_the_servers_address(tmp_path: Path) -> None:
    """Its extension fills in the port and shows that address in a frame below the cell."""
    environ = os.environ | {"HOME": str(tmp_path), "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/second/"}
    command = [sys.executable, "-c", PROGRAM, str(CONFIG)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "/user/ada/second/proxy/%PORT%/\n"
