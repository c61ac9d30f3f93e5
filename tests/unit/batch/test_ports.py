"""What a job may say of its notebook, and who it is taken for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.apihandlers import default_handlers

from gpuhub.batch import upstream
from gpuhub.batch.ports import find_spawner, parse_port
from gpuhub.errors import InvalidRequest


@pytest.mark.parametrize(("body", "port"), [(b'{"port": 1024}', 1024), (b'{"port": 65535}', 65535)])
def test_a_port_is_taken(body: bytes, port: int) -> None:
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
def test_nothing_else_is_taken(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="an integer from 1024 to 65535, and nothing else"):
        parse_port(body)


def test_a_token_is_of_one_server_alone() -> None:
    def take_port(port: int) -> None:
        raise AssertionError(port)

    def spawner(token: str, **more: Any) -> Any:
        return SimpleNamespace(api_token=token, **more)

    first, second = spawner("one", take_port=take_port), spawner("two", take_port=take_port)
    stopped, other = spawner("", take_port=take_port), spawner("three")
    user = SimpleNamespace(spawners={"": first, "b": second, "c": stopped, "d": other})
    assert find_spawner(user, "one") is first
    assert find_spawner(user, "two") is second
    for token in ("", "on", "onex", "three", "ü"):
        assert find_spawner(user, token) is None


def test_batchspawners_own_handler_is_not_there() -> None:
    """It lets a server's token set any attribute of its spawner."""
    assert upstream.SlurmSpawner is not None
    assert [handler for handler in default_handlers if "batchspawner" in handler[0]] == []
