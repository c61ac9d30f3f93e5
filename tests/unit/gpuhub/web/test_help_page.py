"""A page of the documentation as the hub shows it."""

from __future__ import annotations

from gpuhub.web.help_page import SOURCE, render_markdown


def test_headings_keep_their_anchors_and_links_stay_in_the_page() -> None:
    """Problem documents lead to the anchors; other pages of the documentation are not in the hub."""
    html = render_markdown(SOURCE.read_text(encoding="utf-8"))
    assert '<a id="node-unreachable"></a>' in html
    assert "href=" not in html
    assert render_markdown("[a](b.md#c), [here](#d)") == '<p>a, <a href="#d">here</a></p>'
