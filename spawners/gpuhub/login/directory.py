"""Login with the accounts of an LDAP server, over TLS always, beside the hub's own thread, with deadlines."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ldap3
from ldap3.core.exceptions import LDAPBindError, LDAPExceptionError, LDAPStartTLSError
from ldap3.utils.conv import escape_filter_chars
from ldap3.utils.dn import escape_rdn
from ldapauthenticator import LDAPAuthenticator
from ldapauthenticator.ldapauthenticator import TlsStrategy
from tornado import web
from traitlets import Unicode

from gpuhub.login.forms import Form

_PATIENCE_S = 5
_THREADS = 4
#: Busy, unavailable, and what has no name: nothing about the password.
_OUT_OF_ORDER = frozenset({51, 52, 80})


class Ldap(Form, LDAPAuthenticator):  # type: ignore[misc] # untyped
    """Binds as the user, whose entry `bind_dn_template` tells, and asks as the user for groups."""

    group_base = Unicode(config=True, help="Where groups are searched; empty: nowhere.")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="ldap")

    async def identify(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """The server decides about the password; names and groups decide afterwards."""
        work = functools.partial(self._ask, name, password)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (LDAPExceptionError, OSError) as error:
            self.log.warning("LDAP server %s: %s", self.server_address, error)
            raise web.HTTPError(503, reason="The LDAP server does not answer, or not as it should") from None

    def get_connection(self, userdn: str, password: str) -> Any | None:
        """As the library's, with deadlines; None where the server refuses the password."""
        server = ldap3.Server(
            self.server_address,
            port=self.server_port,
            use_ssl=self.tls_strategy == TlsStrategy.on_connect,
            tls=ldap3.Tls(**self.tls_kwargs),
            connect_timeout=_PATIENCE_S,
        )
        connection = ldap3.Connection(
            server, user=userdn, password=password, read_only=True, receive_timeout=_PATIENCE_S
        )
        is_bound = False
        try:
            connection.open(read_server_info=False)
            if not server.ssl and not connection.start_tls(read_server_info=False):
                raise LDAPStartTLSError(str(connection.result))
            is_bound = connection.bind(read_server_info=False)
            if connection.result["result"] in _OUT_OF_ORDER:
                raise LDAPBindError(str(connection.result))
            return connection if is_bound else None
        finally:
            if not is_bound:
                connection.unbind()
                if connection.socket is not None:
                    connection.socket.close()  # which the library leaves open where TLS has failed

    def _ask(self, name: str, password: str) -> dict[str, Any] | None:
        """Blocks."""
        if not password.strip():
            return None  # many servers take a name without a password for nobody in particular, and let them in
        entry = self.bind_dn_template[0].format(username=escape_rdn(name))
        connection = self.get_connection(entry, password)
        if connection is None:
            return None
        try:
            return {"name": name, "groups": sorted(self.rules.known(self._groups(connection, entry, name)))}
        finally:
            connection.unbind()

    def _groups(self, connection: Any, entry: str, name: str) -> set[str]:
        if not (self.group_base and self.rules.known_groups):
            return set()
        wanted = self.group_search_filter.format(userdn=escape_filter_chars(entry), uid=escape_filter_chars(name))
        connection.search(search_base=self.group_base, search_filter=wanted, attributes=["cn"])
        return {str(common) for found in connection.entries for common in found.cn.values}
