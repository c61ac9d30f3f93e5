"""Fixtures of tests with forked ranks."""

from __future__ import annotations

import pytest

from tests.support.launch.agent_node import Node


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node whose home is a new folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("GPUHUB_NETWORK_SUBNET", raising=False)
        made = Node(home)
        yield made
        made.close()
