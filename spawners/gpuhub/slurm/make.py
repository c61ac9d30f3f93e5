"""The way to Slurm that cluster.toml asks for."""

from __future__ import annotations

from gpuhub.errors import SetupError
from gpuhub.identity import find_account
from gpuhub.slurm.api import SlurmApi
from gpuhub.slurm.cli import SlurmCli
from gpuhub.slurm.jwt import Key
from gpuhub.slurm.people import FindName
from gpuhub.slurm.rest import SlurmRest
from gpuhub.slurm.table import Slurm


def make_api(table: Slurm, find_name: FindName = find_account) -> SlurmApi:
    """Nothing is asked yet; close it after use. `find_name` is for users whom Slurm tells by number only.

    Raises:
        SetupError: the key of slurmrestd's tokens can't be read.
    """
    if table.api == "cli":
        return SlurmCli(commands=table.commands, conf=table.conf, find_name=find_name)
    if table.rest_url is None or table.rest_key is None:
        raise SetupError('slurm.api = "rest" needs rest_url and rest_key')
    return SlurmRest(table.rest_url, Key.read(table.rest_key), user=table.rest_user, find_name=find_name)
