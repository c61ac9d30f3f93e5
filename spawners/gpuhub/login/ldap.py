"""Login with the accounts of an LDAP server, always over TLS, outside of the hub's thread, with deadlines."""

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

from gpuhub.login.password_forms import FormAuthenticator

#: Maximum wait for the server, seconds.
_TIMEOUT_S = 5
_THREADS = 4
#: Result codes busy, unavailable and other, which do not depend on the password.
_OUT_OF_ORDER = frozenset({51, 52, 80})


class LdapAuthenticator(FormAuthenticator, LDAPAuthenticator):  # type: ignore[misc] # untyped
    """Binds as the user, with an entry from `bind_dn_template`, and searches the groups as the user."""

    group_base = Unicode(config=True, help="Where groups are searched; empty: nowhere.")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="ldap")

    async def verify_password(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        work = functools.partial(self._verify, name, password)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (LDAPExceptionError, OSError) as error:
            self.log.warning("LDAP server %s: %s", self.server_address, error)
            raise web.HTTPError(503, reason="The LDAP server does not answer, or its answer is not valid") from None

    def get_connection(self, userdn: str, password: str) -> Any | None:
        """Connect as the library does, but with deadlines; None if the server refuses the password."""
        server = ldap3.Server(
            self.server_address,
            port=self.server_port,
            use_ssl=self.tls_strategy == TlsStrategy.on_connect,
            tls=ldap3.Tls(**self.tls_kwargs),
            connect_timeout=_TIMEOUT_S,
        )
        connection = ldap3.Connection(
            server, user=userdn, password=password, read_only=True, receive_timeout=_TIMEOUT_S
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
                    connection.socket.close()  # the library leaves it open after a failure of TLS

    def _verify(self, name: str, password: str) -> dict[str, Any] | None:
        if not password.strip():
            return None  # many servers accept a name without a password as an anonymous bind
        entry = self.bind_dn_template[0].format(username=escape_rdn(name))
        connection = self.get_connection(entry, password)
        if connection is None:
            return None
        try:
            return {"name": name, "groups": sorted(self.rules.filter_known(self._groups(connection, entry, name)))}
        finally:
            connection.unbind()

    def _groups(self, connection: Any, entry: str, name: str) -> set[str]:
        if not (self.group_base and self.rules.known_groups):
            return set()
        search_filter = self.group_search_filter.format(
            userdn=escape_filter_chars(entry), uid=escape_filter_chars(name)
        )
        connection.search(search_base=self.group_base, search_filter=search_filter, attributes=["cn"])
        return {str(name) for group in connection.entries for name in group.cn.values}
