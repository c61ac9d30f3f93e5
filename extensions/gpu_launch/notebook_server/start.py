"""Starts a notebook's server: JupyterHub's `jupyterhub-singleuser`, which the image replaces by this.

JupyterHub's own program also imports the hub's pages and database, of which a server uses nothing, and which take half
of the time until it answers. Here they are left out.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import Any

#: Modules that only functions in the hub use. They are imported when something of them is used.
DELAYED = ("sqlalchemy", "jupyterhub.orm", "jupyterhub.roles")
#: Classes that a server's modules import and only compare others to: an error of the database, and a page's handler.
LEFT_OUT = {
    "sqlalchemy.exc": ("SQLAlchemyError", Exception),
    "jupyterhub.handlers.pages": ("HealthCheckHandler", object),
}


class _DelayedModule(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def import_singleuser() -> Any:
    """Import JupyterHub's module that starts a server, and return it."""
    stand_ins: dict[str, ModuleType] = {name: _DelayedModule(name) for name in DELAYED}
    stand_ins["jupyterhub.handlers"] = ModuleType("jupyterhub.handlers")
    for name, (class_name, base) in LEFT_OUT.items():
        stand_ins[name] = ModuleType(name)
        setattr(stand_ins[name], class_name, type(class_name, (base,), {}))
    sys.modules |= stand_ins
    try:
        from jupyterhub import singleuser
    finally:
        # Whatever else asks for them gets the real ones.
        for name in stand_ins:
            del sys.modules[name]
    return singleuser


def main() -> None:
    """Run the server until it is stopped."""
    # What is imported stays: looking for garbage in it takes a tenth of the time.
    gc.disable()
    singleuser = import_singleuser()
    gc.freeze()
    gc.enable()
    singleuser.main()
