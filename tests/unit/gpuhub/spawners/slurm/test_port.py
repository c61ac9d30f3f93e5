"""Reports of a notebook's port, and the server to which they belong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.apihandlers import default_handlers

from gpuhub.common.errors import InvalidRequest
from gpuhub.spawners.slurm import job_spawner
from gpuhub.spawners.slurm.port import find_spawner, parse_port


@pytest.mark.parametrize(("body", "port"), [(b'{"port": 1024}', 1024), (b'{"port": 65535}', 65535)])
def test_valid_port_is_accepted(body: bytes, port: int) -> None:
    assert parse_port(body) == port


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"port",
        b"40000",
        b"[40000]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"port": 1023}',
        b'{"port": 65536}',
        b'{"port": -1}',
        b'{"port": "40000"}',
        b'{"port": 40000.0}',
        b'{"port": 4e4}',
        b'{"port": true}',
        b'{"port": null}',
        b'{"port": [40000]}',
        b'{"port": 40000, "ip": "10.0.0.1"}',
        b'{"ip": "10.0.0.1"}',
        b'{"cmd": ["sh"]}',
        b'{"port": 40000' + b" " * 100 + b"}",
        b"[" * 60,
    ],
)
def test_invalid_port_documents_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="an integer from 1024 to 65535, and nothing else"):
        parse_port(body)


def test_token_identifies_exactly_one_server() -> None:
    def set_port(port: int) -> None:
        raise AssertionError(port)

    def spawner(token: str, **more: Any) -> Any:
        return SimpleNamespace(api_token=token, **more)

    first, second = spawner("one", set_port=set_port), spawner("two", set_port=set_port)
    stopped, other = spawner("", set_port=set_port), spawner("three")
    user = SimpleNamespace(spawners={"": first, "b": second, "c": stopped, "d": other})
    assert find_spawner(user, "one") is first
    assert find_spawner(user, "two") is second
    for token in ("", "on", "onex", "three", "ü"):
        assert find_spawner(user, token) is None


def test_batchspawner_handler_is_not_registered() -> None:
    """It lets a server's token set any attribute of its spawner."""
    assert job_spawner.SlurmSpawner is not None
    assert [handler for handler in default_handlers if "batchspawner" in handler[0]] == []
