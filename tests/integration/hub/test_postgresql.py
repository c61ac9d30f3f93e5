"""Hub and broker with PostgreSQL, as one table of cluster.toml chooses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from gpuhub.ops.deploy.database import ensure_database
from tests.support.hub.served_hub import SETTINGS, ServedHub
from tests.support.hub.sessions import call_broker, find_states, log_in
from tests.support.postgresql import run_postgresql

pytestmark = pytest.mark.root


class PostgresqlHub(ServedHub):
    """A hub whose schemas are made as `gpuhub up` makes them."""

    def begin(self, name: str) -> None:
        """Start a program."""
        ensure_database(self.cluster, self.paths)
        super().begin(name)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub, with an empty database."""
    folder = tmp_path_factory.mktemp("hub")
    with run_postgresql() as server:
        database = server.build_settings("gpuhub", folder)
        table = f'[database]\nurl = "{database.url}"\npassword_file = "{database.password_file}"\n'
        served = PostgresqlHub("ghpg", folder, "", 18660, settings=SETTINGS + table)
        try:
            served.start()
            yield served
        finally:
            served.stop()


def test_hub_and_broker_keep_everything_in_postgresql(hub: ServedHub) -> None:
    """After a restart of both, a token, a running notebook and a waiting request are there; no file of SQLite is."""
    with closing(log_in(hub, "ada")) as browser:
        token = browser.post("/hub/api/users/ada/tokens").json()["token"]
        assert browser.post("/hub/api/users/ada/server").status_code in {201, 202}
    asked = {"profile": "cpu", "key": "k"}
    assert call_broker(hub, "POST", "/leases", token, json=asked).status_code == 201
    for name in ("hub", "broker"):
        hub.end(name)
    for name in ("broker", "hub"):
        hub.begin(name)
    hub.wait_ready()
    assert find_states(hub) == {"ada": "requested"}
    (lease,) = call_broker(hub, "GET", "/leases", token).json()
    assert lease["owner"] == "ada"
    with closing(log_in(hub, "ada")) as browser:
        assert browser.get("/hub/api/users/ada").json()["servers"][""]["ready"] is True
    assert list(hub.paths.state.rglob("*.sqlite")) == []
