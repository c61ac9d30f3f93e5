"""Actions that pages of the hub send."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpuhub.common.errors import InvalidRequest
from gpuhub.web import notifications_page
from gpuhub.web.gpus_page import actions
from tests.support.loop_time import MAX_STEP_S

#: The largest body that the hub receives, bytes.
SIZE = 4 * 1024**2


@pytest.mark.parametrize("parse", [actions.parse_action, actions.parse_leave_request, notifications_page.parse_action])
@pytest.mark.parametrize(
    "text", ["".join(f'"{number:07d}":0,' for number in range(SIZE // 12)), '"kinds":[' + "0," * (SIZE // 2) + "0],"]
)
def test_large_bodies_do_not_hold_up_the_hub(parse: Callable[[bytes], object], text: str) -> None:
    """Hundreds of thousands of mistakes in one body are not looked for."""
    body = f'{{{text}"do":"change"}}'.encode()
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"it has 4\d{6} bytes, of at most 16384"):
        parse(body)
    assert time.thread_time() - began < MAX_STEP_S
