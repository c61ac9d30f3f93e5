"""Builds the Slurm client that cluster.toml configures."""

from __future__ import annotations

from gpuhub.common.errors import SetupError
from gpuhub.config.slurm import SlurmSettings
from gpuhub.config.users.identity import find_account_name
from gpuhub.slurm_client.cli import SlurmCliClient
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.slurm_client.job_control import FindName
from gpuhub.slurm_client.rest import SlurmRestClient, TokenKey

#: The usual account of slurmctld, to which the key of tokens belongs.
_SLURM_USER = "slurm"


def make_client(table: SlurmSettings, find_name: FindName = find_account_name) -> SlurmClient:
    """Build the client, which must be closed after use. Sends nothing.

    Args:
        find_name: Finds the name of a user for whom Slurm reports only the UID.

    Raises:
        SetupError: The key of slurmrestd's tokens cannot be read, or others can read it.
    """
    if table.api == "cli":
        return SlurmCliClient(commands=table.commands, conf=table.conf, find_name=find_name)
    if table.rest_url is None or table.rest_key is None:
        raise SetupError('slurm.api = "rest" needs rest_url and rest_key')
    key = TokenKey.read(table.rest_key, table.rest_user, _SLURM_USER)
    return SlurmRestClient(table.rest_url, key, user=table.rest_user, find_name=find_name)
