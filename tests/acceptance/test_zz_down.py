"""`make down` leaves nothing; this module runs last in its folder."""

from __future__ import annotations

from gpuhub_closet import layouts, lifecycle
from tests.support.hub.browser import Product, run_make


def test_down_leaves_nothing(product: Product):
    """After `make down` no process, namespace, container, network or mount of the instance exists, and `up` works
    again.
    """
    output = run_make("down")
    assert "Stopped" in output
    assert lifecycle.find_leftovers(layouts.build_plan(product.paths.instance), product.paths) == []
    assert not product.paths.run.exists()
