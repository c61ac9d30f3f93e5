"""Calls on workers as bytes: what becomes of exceptions that cannot be sent."""

from __future__ import annotations

import pytest

from gpu_launch.sessions import calls


class LocalError(Exception):
    """One that no other process can build again; its text fails on demand."""

    def __init__(self, number: int, *, has_text: bool) -> None:
        super().__init__()
        self.number, self.has_text = number, has_text

    def __str__(self) -> str:
        if not self.has_text:
            raise LookupError("no text")
        return f"number {self.number}"


def fail(*, has_text: bool) -> None:
    raise LocalError(3, has_text=has_text)


@pytest.mark.parametrize(
    ("has_text", "text"),
    [(True, "^LocalError: number 3$"), (False, "^LocalError, whose text cannot be read$")],
)
def test_exception_that_cannot_be_sent_is_told(has_text: bool, text: str) -> None:
    """Also one without a text: an answer that fails would count as the end of the worker."""
    answer = calls.run_call(calls.dump_call(fail, (), {"has_text": has_text}))
    with pytest.raises(RuntimeError, match=text) as caught:
        calls.load_result(answer)
    assert "raise LocalError(3" in str(caught.value.__cause__)
