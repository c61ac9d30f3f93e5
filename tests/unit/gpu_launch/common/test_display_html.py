"""What a rank displays as HTML."""

from __future__ import annotations

import base64

from gpu_launch.common.display_html import render_data


def test_each_type_has_its_html():
    """HTML first, then images, then text, which is escaped."""
    assert render_data({"text/plain": "t", "text/html": "<i>h</i>", "image/png": "AA"}) == "<i>h</i>"
    image = render_data({"text/plain": "t", "image/png": "QUJD\nRA=="}, {"image/png": {"width": 3, "height": '"'}})
    assert image == '<img alt="" src="data:image/png;base64,QUJDRA==" width="3">'
    assert base64.b64encode(b"<svg/>").decode() in render_data({"image/svg+xml": "<svg/>"})
    assert render_data({"text/latex": "$a<b$"}) == "$a&lt;b$"
    assert render_data({"text/plain": "<x>"}) == "<pre>&lt;x&gt;</pre>"
    assert (
        render_data({"application/x+json": {"a": "<"}})
        == "<pre>{&quot;application/x+json&quot;: {&quot;a&quot;: &quot;&lt;&quot;}}</pre>"
    )
