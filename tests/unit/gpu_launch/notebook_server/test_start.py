"""What a notebook's server imports of JupyterHub."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Prints which of the modules are imported after each step.
PROGRAM = """
import sys
from gpu_launch.notebook_server import start
singleuser = start.import_singleuser()
names = ("alembic", "sqlalchemy", "jupyterhub.orm", "jupyterhub.handlers", "jupyterhub.handlers.pages")
print(singleuser.__name__, [name for name in names if name in sys.modules])
from jupyterhub import scopes
print(sorted(scopes._intersect_expanded_scopes({"access:servers", "read:users!user=ada"}, {"access:servers!user=ada"})))
print([name for name in names if name in sys.modules])
print(scopes.orm.User.__name__, scopes.sa.inspect.__name__, scopes.roles.get_default_roles.__name__)
from jupyterhub.handlers.pages import HomeHandler
from jupyterhub import orm, roles
print(HomeHandler.__name__, orm.User.__name__, roles.get_default_roles.__name__)
"""


@pytest.mark.process
def test_server_starts_without_the_hubs_parts() -> None:
    """Neither the database nor the hub's pages; a later import of them is the real one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == [
        "jupyterhub.singleuser []",
        "['access:servers!user=ada']",
        "[]",
        "User inspect get_default_roles",
        "HomeHandler User get_default_roles",
    ], done.stderr
