"""The Jupyter Server extension that has JupyterLab load its extensions from the hub, where browsers keep their files.

The hub has those of its current notebook image and passes their list; a server with others, as of an image that was
built upon it, keeps to its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Variable: `{"url": path at the hub, "load": {extension: its first file}}`; empty where the hub has no files.
VARIABLE = "GPUHUB_LAB_EXTENSIONS"
#: Folders in which JupyterLab looks in addition to that of the image.
OTHER_FOLDERS = (Path("/usr/local/share/jupyter/labextensions"), Path("/usr/share/jupyter/labextensions"))


def find_url(variables: Mapping[str, str], folders: tuple[Path, ...]) -> str | None:
    """Return the path at the hub below which it has all extensions of this server; None if it lacks one.

    Args:
        folders: Where this server has extensions.
    """
    at_hub = json.loads(variables.get(VARIABLE) or "{}")
    files = [file for folder in folders for pattern in ("*", "@*/*") for file in folder.glob(f"{pattern}/package.json")]
    packages = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    own = {package["name"]: package["jupyterlab"]["_build"]["load"] for package in packages}
    return at_hub["url"] if at_hub and own.items() <= at_hub["load"].items() else None


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    url = find_url(os.environ, (Path(sys.prefix, "share/jupyter/labextensions"), *OTHER_FOLDERS))
    if url is not None:
        # JupyterHub's extension, which is loaded later, sets the hook before it first runs the event loop.
        server.io_loop.add_callback(_add_page_config_hook, server.web_app.settings, url)


def _add_page_config_hook(settings: dict[str, Any], url: str) -> None:
    earlier = settings.get("page_config_hook")

    def set_url(handler: Any, page_config: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = page_config if earlier is None else earlier(handler, page_config)
        return config | {"fullLabextensionsUrl": url}

    settings["page_config_hook"] = set_url
