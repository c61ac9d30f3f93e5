"""Sphinx's settings for the documentation as a site; `make docs` builds it.

The source folder is the repository's, so that links to README.md and others lead somewhere on the site as well.
"""

from __future__ import annotations

project = "gpuhub"
author = "the gpuhub developers"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "images/README.md"]
extensions = ["myst_parser", "sphinx_copybutton"]
# As GitHub makes them, so that links to headings lead to the same place there and here.
myst_heading_anchors = 4
copybutton_prompt_text = "$ "
html_theme = "pydata_sphinx_theme"
html_title = "gpuhub"
html_show_copyright = False
html_theme_options = {"navbar_center": [], "navigation_with_keys": True, "secondary_sidebar_items": ["page-toc"]}
# All pages by their captions, on each page.
html_sidebars = {"**": ["globaltoc.html"]}
