"""`make down` leaves nothing; it runs last in its tier."""

from __future__ import annotations

from gpuhub.closet import lifecycle, plan

from .conftest import Product, run_make


def test_down_leaves_nothing(product: Product):
    """No process, namespace, container, network or mount of the instance is there after `make down`; up works again."""
    output = run_make("down")
    assert "Stopped" in output
    assert lifecycle.leftovers(plan.practice_plan(product.paths.instance), product.paths) == []
    assert not product.paths.run.exists()
