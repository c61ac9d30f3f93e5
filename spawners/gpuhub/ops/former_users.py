"""`gpuhub user free`: gives the name of a former user to the next one, without files, UID and account of the former."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing, suppress

import sqlalchemy as sa

from gpuhub.backends.plugin import find_capabilities
from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import READ_ONLY, build_engine
from gpuhub.common import names
from gpuhub.common.errors import InvalidRequest, NotAllowed, NotFound
from gpuhub.common.paths import Paths
from gpuhub.config.database import DatabaseSettings, build_database_url
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.config.users.identity import find_ordinary_accounts, find_own_account, read_uids, retire_uid
from gpuhub.docker.client import DockerClients
from gpuhub.login.accounts import AccountBindings, describe_name_pattern, is_valid_name
from gpuhub.login.kinds import find_bindings_file
from gpuhub.storage.homes import move_home_aside


def free_name(cluster: ClusterSettings, paths: Paths, name: str, *, home_moved: bool = False) -> list[str]:
    """Free a name for another person, and return a line for each thing that was done.

    The binding is removed last: if a step fails, the name stays blocked, and the command can be repeated.

    Raises:
        InvalidRequest: It cannot be a user's name.
        NotAllowed: The user still exists on the hub, runs something, or has an account of the head node.
        GpuhubError: A node does not answer, or the home cannot be moved.
    """
    if not is_valid_name(name):
        raise InvalidRequest(f"{name!r} cannot be a user's name: {describe_name_pattern()}")
    account = find_own_account(cluster.users, name)
    if account is not None and find_ordinary_accounts([account]):
        raise NotAllowed(
            f"{name} has the account {account} of the head node, and its files stay with it: remove the account, or "
            "its line below [users.accounts] in cluster.toml"
        )
    _check_deleted(cluster.database, paths, name)
    nodes = cluster.nodes if find_capabilities(cluster).containers else ()
    lines = asyncio.run(_remove_scratch(nodes, paths, name))
    uid = read_uids(paths.state).get(name)
    if uid is not None:
        aside = None if home_moved else move_home_aside(cluster.storage, name, uid)
        retire_uid(paths.state, name)
        lines += [] if aside is None else [f"The home is {aside} now."]
        lines.append(f"UID {uid} is not given to other users.")
    return [*lines, *_forget_destinations(cluster.database, paths, name), *forget_account(paths, name)]


def _forget_destinations(database: DatabaseSettings, paths: Paths, name: str) -> list[str]:
    """Delete where the former user's notifications were sent, and the notifications."""
    if database.url is None and not paths.store.exists():
        return []
    engine = build_engine(build_database_url(database, paths, "broker"))
    try:
        with engine.begin() as store:
            if not sa.inspect(store).has_table("destinations"):
                return []
            for table in (tables.deliveries, tables.notifications):
                store.execute(sa.delete(table).where(table.c.owner == name))
            count = store.execute(sa.delete(tables.destinations).where(tables.destinations.c.owner == name)).rowcount
    finally:
        engine.dispose()
    return [f"Destinations of notifications are removed: {count}."] if count else []


def forget_account(paths: Paths, name: str) -> list[str]:
    """Let the next account of the provider have the name, with all files, and return a line if one had it."""
    is_released = AccountBindings.release(find_bindings_file(paths), name)
    return [f"The next account of the provider that logs in as {name} has the name."] if is_released else []


def _check_deleted(database: DatabaseSettings, paths: Paths, name: str) -> None:
    """Check that the hub has no user of this name, whose sessions and tokens would be the next user's."""
    if database.url is None and not paths.hub_database.exists():
        return
    engine = build_engine(build_database_url(database, paths, "hub"))
    try:
        with closing(engine.connect().execution_options(**READ_ONLY)) as connection:
            query = sa.text("SELECT 1 FROM users WHERE name = :name")
            is_known = connection.execute(query, {"name": name}).first() is not None
    finally:
        engine.dispose()
    if is_known:
        raise NotAllowed(f"{name} is still a user of the hub: delete the user on the hub's page /hub/admin first")


async def _remove_scratch(nodes: Sequence[NodeSettings], paths: Paths, name: str) -> list[str]:
    """Remove the user's scratch volumes from all nodes, once no container of the user is on any of them."""
    daemons = DockerClients(nodes, instance=paths.instance, run_dir=paths.run)
    owner = {"label": [f"{names.LABEL_INSTANCE}={paths.instance}", f"{names.LABEL_OWNER}={name}"]}
    volume, lines = names.scratch_volume_name(paths.instance, name), []
    try:
        containers = await asyncio.gather(
            *(daemons.call(node.name, "containers", all=True, filters=owner) for node in nodes)
        )
        busy = [node.name for node, found in zip(nodes, containers, strict=True) if found]
        if busy:
            raise NotAllowed(f"containers of {name} are on {', '.join(busy)}: end the user's notebooks and jobs first")
        for node in nodes:
            with suppress(NotFound):
                await daemons.call(node.name, "remove_volume", volume)
                lines.append(f"The scratch on {node.name} is removed.")
    finally:
        daemons.close()
    return lines
