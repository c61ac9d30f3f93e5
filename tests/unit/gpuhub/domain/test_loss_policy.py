"""How often a persistent notebook asks again."""

from __future__ import annotations

from gpuhub.domain import loss_policy


def test_three_restarts_within_an_hour() -> None:
    """The fourth loss within an hour is the last; an hour later the count begins again."""
    losses: tuple[float, ...] = ()
    answers = []
    for at in (0.0, 60.0, 120.0, 180.0):
        losses = loss_policy.record_loss(losses, at)
        answers.append(loss_policy.may_restart(losses))
    assert answers == [True, True, True, False]
    assert loss_policy.may_restart(loss_policy.record_loss(losses[:3], 3600.0))
    assert loss_policy.record_loss((5.0, 10.0), 3605.0) == (10.0, 3605.0)


def test_losses_of_the_future_do_not_count() -> None:
    """A clock that was set back must not end a notebook."""
    assert loss_policy.record_loss((100.0, 200.0), 50.0) == (50.0,)
