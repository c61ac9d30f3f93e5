"""The culler's question to the broker."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.common.errors import BrokerUnreachable, GpuhubError
from gpuhub.culler.arbiter import Arbiter

#: As `GET /users` of JupyterHub 6.1 has them, without what the arbiter does not read.
DEFAULT = {"name": "", "full_name": "ada/", "pending": None, "ready": True, "user_options": {"profile": "rtx5090"}}
NAMED = {**DEFAULT, "name": "second", "full_name": "ada/second"}


class Broker:
    def __init__(self, answer: bool | GpuhubError) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    async def reclaim(self, owner: str, server: str) -> bool:
        self.asked.append((owner, server))
        if isinstance(self.answer, GpuhubError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
async def test_broker_alone_decides(answer: bool) -> None:
    """The answer is the broker's, for default and named servers, whatever the hub says of activity."""
    broker = Broker(answer)
    times: dict[str, Any] = {"inactive": None, "inactive_limit": 600}
    assert [await Arbiter(broker).decide(server=server, **times) for server in (DEFAULT, NAMED)] == [answer] * 2
    assert broker.asked == [("ada", ""), ("ada", "second")]


async def test_nothing_is_stopped_while_the_broker_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """The notebook continues, and the log says that it is asked about again."""
    assert not await Arbiter(Broker(BrokerUnreachable("The GPU broker does not answer."))).decide(server=NAMED)
    assert "ada/second is asked about again: The GPU broker does not answer." in caplog.text
