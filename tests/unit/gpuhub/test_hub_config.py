"""Values of jupyterhub_config.py about services that stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub import hub_config
from gpuhub.common.errors import SettingsError
from tests.support.clusters import build_cluster


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with a service for all, and one for the group lab."""
    common = {"image": "notes:1", "port": 8000}
    tables = [{"name": "notes", **common}, {"name": "labels", "groups": ["lab"], **common}]
    groups = [{"name": "lab", "members": ["ben"]}]
    settings = build_cluster(services=tables, groups=groups)
    monkeypatch.setattr(hub_config, "cluster", lambda: settings)
    monkeypatch.setattr(hub_config, "head_address", lambda: "192.168.1.20")


def build_user(name: str, *groups: str) -> Any:
    return SimpleNamespace(name=name, orm_user=SimpleNamespace(groups=[SimpleNamespace(name=one) for one in groups]))


def test_the_menu_has_what_the_user_may_use() -> None:
    """By groups of the hub and of the settings; before the login there is nothing."""
    names = {
        who: [link["name"] for link in hub_config.service_links(user)]
        for who, user in (
            ("ada", build_user("ada")),
            ("ben", build_user("ben")),
            ("eve", build_user("eve", "lab")),
            ("nobody", None),
        )
    }
    everything = ["notes", "labels"]
    assert names == {"ada": ["notes"], "ben": everything, "eve": everything, "nobody": []}
    assert hub_config.service_links(build_user("ada")) == [{"name": "notes", "href": "/services/notes/"}]


def test_services_are_routed_to_the_broker() -> None:
    """Each at its own address."""
    routes = hub_config.extra_routes()
    assert list(routes) == ["/services/notes/", "/services/labels/"]
    assert set(routes.values()) == {hub_config.broker_origin()}


def test_a_service_of_the_hub_keeps_its_name() -> None:
    """An administrator's own service at the same address is refused, with both places."""
    hub_config.check_service_names([{"name": "broker"}, {"name": "announcements"}])
    with pytest.raises(SettingsError, match=r"services: notes: jupyterhub_config\.d has a service of that name"):
        hub_config.check_service_names([{"name": "broker"}, {"name": "notes"}])
