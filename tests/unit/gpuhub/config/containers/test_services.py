"""`[[services]]`: what is accepted, and what is refused with the key, the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpuhub.config.base import describe_mistakes
from gpuhub.config.containers.services import MAX_SERVICES, ServiceSettings, find_service_node
from gpuhub.config.settings import ClusterSettings
from tests.support.clusters import build_cluster

GUEST = {"name": "lent", "address": "10.0.0.9", "docker": "ssh://me@10.0.0.9", "guest": True}
BARE = {"name": "bare", "address": "10.0.0.8"}
NODE = {"name": "rig1", "address": "192.168.1.21", "docker": "unix:///run/rig1.sock"}
PROFILE = {"name": "cpu", "title": "No GPU", "gpu_count": 0}


def build(*tables: dict[str, Any], **changes: Any) -> ClusterSettings:
    needed = {"name": "notes", "image": "notes:1", "port": 8000}
    return build_cluster(services=[needed | table for table in tables], **changes)


def find_mistakes(*tables: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        build(*tables, **changes)
    return "\n".join(describe_mistakes(caught.value, ClusterSettings))


def test_four_lines_are_enough() -> None:
    """It runs on the first node, as a user without rights, with a folder at /data, for everybody."""
    (service,) = build({"data": "/srv/notes"}).services
    assert service.admits("ada", frozenset())
    assert (service.mount, service.owner, service.internet) == ("/data", (65533, 65533), False)
    node = find_service_node(service, build({}).nodes)
    assert node is not None
    assert node.name == "rig1"


@pytest.mark.parametrize(
    ("table", "refusal"),
    [
        ({"name": "broker"}, "services: 'broker': name: the hub itself uses this name"),
        ({"name": "gpuhub-metrics"}, "name: the hub itself uses this name"),
        ({"name": "Notes"}, "services[1].name: 'Notes': string should match pattern"),
        ({"name": "a/b"}, "services[1].name"),
        ({"port": 0}, "services[1].port: 0: input should be greater than or equal to 1"),
        ({"port": 65536}, "services[1].port: 65536: input should be less than or equal to 65535"),
        ({"node": "rig9"}, "services: 'notes': node: there is no node 'rig9'; there are rig1, rig2, rig3"),
        ({"users": ["Ada!"]}, "services[1].users[1]"),
        ({"data": "/etc/notes"}, "'/etc/notes' is not a folder for data: choose one below /srv, /mnt"),
        ({"data": "/srv"}, "'/srv' is not a folder for data"),
        ({"data": "/srv/../etc"}, "services[1].data: '/srv/../etc': string should match pattern"),
        ({"data": "srv/notes"}, "services[1].data"),
        ({"data": "/srv/home/ada"}, "/srv/home/ada and storage.home (/srv/home) overlap: choose another folder"),
        ({"data": "/srv/datasets"}, "/srv/datasets and storage.datasets (/srv/datasets) overlap"),
        ({"user": "0:0"}, "'0:0': a service does not run as root"),
        ({"user": "1000:00"}, "a service does not run as root"),
        ({"user": "ada"}, "services[1].user: 'ada': string should match pattern"),
        ({"environment": ["A"]}, "services[1].environment[1]"),
        ({"environment": ["NVIDIA_VISIBLE_DEVICES=all"]}, "NVIDIA_VISIBLE_DEVICES: a service has no GPU"),
        ({"variables": ["PATH=/srv"]}, "PATH: a service cannot set this variable of users' containers"),
        ({"variables": ["JUPYTERHUB_API_TOKEN=x"]}, "JUPYTERHUB_API_TOKEN: a service cannot set this variable"),
        ({"variables": ["LD_PRELOAD={url}"]}, "LD_PRELOAD: a service cannot set this variable"),
        ({"variables": ["A=1\nB=2"]}, "services[1].variables[1]"),
        (
            {"preset": "wandb"},
            "services[1].preset: 'wandb': input should be 'mlflow', 'python-packages' or 'hugging-face'",
        ),
        ({"preset": "mlflow"}, "services: 'notes': data: mlflow needs a folder, such as /srv/notes"),
        ({"memory": "much"}, "services[1].memory"),
        ({"restart": "always"}, "services[1].restart: there is no such key"),
    ],
)
def test_mistakes_name_key_value_and_remedy(table: dict[str, Any], refusal: str) -> None:
    """Each is refused when the settings are read, before anything starts."""
    assert refusal in find_mistakes(table)


def test_nodes_without_containers_of_the_owner_are_refused() -> None:
    """Guests get jobs alone, and a node without Docker no container."""
    guests = {"endpoint": "hub.example.org:51820"}
    assert "lent is a guest" in find_mistakes({"node": "lent"}, nodes=[NODE, GUEST], profiles=[PROFILE], guests=guests)
    assert "bare has no docker address" in find_mistakes({"node": "bare"}, nodes=[NODE, BARE], profiles=[PROFILE])


def test_a_group_that_nobody_can_be_in_is_refused() -> None:
    """With local passwords, groups are those of the settings."""
    users = {"login": "password", "allowed": ["ada"]}
    assert "services: 'notes': groups: 'lab'" in find_mistakes({"groups": ["lab"]}, users=users)
    build({"groups": ["lab"]}, users=users, groups=[{"name": "lab", "members": ["ada"]}])


def test_services_share_neither_name_nor_data() -> None:
    """The same folder on another node is another folder."""
    assert "services: name = 'notes' occurs 2 times" in find_mistakes({}, {})
    tables = {"name": "one", "data": "/srv/x"}, {"name": "two", "data": "/srv/x/y"}
    assert "services: 'two': data: /srv/x/y overlaps with the data of 'one'" in find_mistakes(*tables)
    build(tables[0], tables[1] | {"node": "rig2"})
    many = [{"name": f"s{number}"} for number in range(MAX_SERVICES + 1)]
    assert f"services: there are {MAX_SERVICES + 1}; at most {MAX_SERVICES} are possible" in find_mistakes(*many)


def test_users_and_groups_are_admitted() -> None:
    """One of both is enough."""
    service = ServiceSettings(name="a", image="b", port=1, users=("ada",), groups=("lab",))
    assert [service.admits(*who) for who in (("ada", ()), ("ben", ("lab",)), ("eve", ("other",)))] == [
        True,
        True,
        False,
    ]


def test_variables_have_the_address_in_users_containers() -> None:
    """The same one in all of them; a variable that two services set is refused."""
    tables = {"name": "one", "variables": ["ONE={url}/api", "MODE=a=b"]}, {"name": "two", "variables": ["TWO={url}"]}
    one, two = build(*tables).services
    assert one.build_variables() == {"ONE": "http://127.0.0.1:18034/services/one/api", "MODE": "a=b"}
    assert two.build_variables() == {"TWO": "http://127.0.0.1:18034/services/two"}
    mistakes = find_mistakes(*tables, {"name": "three", "variables": ["ONE=x"]})
    assert "services: 'three': variables: 'one' sets ONE as well: leave one of them out" in mistakes


@pytest.mark.parametrize("preset", ["mlflow", "python-packages", "hugging-face"])
def test_a_preset_needs_a_name_and_a_folder(preset: str) -> None:
    """Everything else is there, and can be replaced."""
    (service,) = build_cluster(services=[{"name": "mine", "preset": preset, "data": "/srv/mine"}]).services
    assert (service.image, service.port, service.mount) == ("gpuhub/services:latest", 5000, "/data")
    assert all("{name}" not in word for word in service.command)
    assert any(value.startswith("http://127.0.0.1:18034/services/mine") for value in service.build_variables().values())
    (changed,) = build_cluster(
        services=[{"name": "mine", "preset": preset, "data": "/srv/mine", "port": 80, "variables": []}]
    ).services
    assert (changed.port, changed.build_variables()) == (80, {})
