"""What several ranks display, as one block of HTML with a tab for each rank; ranks with the same share a tab."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.output.text import format_count, format_numbers, format_ranks, format_size

#: Most displays of one rank, and characters of HTML of all ranks, that are shown; earlier ones give way.
MAX_ITEMS, MAX_CHARACTERS = 50, 16_000_000
#: In the order in which a display's types are tried.
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_STYLE = """<style>
.gl-tabs{display:flex;flex-wrap:wrap;gap:0 2px;
font:var(--jp-ui-font-size1,13px)/1.5 var(--jp-ui-font-family,system-ui,sans-serif);
color:var(--jp-ui-font-color1,inherit);max-width:100%;margin:4px 0}
.gl-tabs>input{position:absolute;opacity:0;pointer-events:none}
.gl-tabs>label{order:0;padding:2px 10px;cursor:pointer;border-bottom:2px solid transparent;
color:var(--jp-ui-font-color2,inherit)}
.gl-tabs>label:hover{background:var(--jp-layout-color2,#8882)}
.gl-tabs>input:checked+label{border-bottom-color:var(--jp-brand-color1,#1976d2);color:var(--jp-ui-font-color0,inherit);
font-weight:600}
.gl-tabs>input:focus-visible+label{outline:2px solid var(--jp-brand-color1,#1976d2)}
.gl-tabs>.gl-page{order:1;flex:1 0 100%;display:none;overflow-x:auto;padding:8px 0;
border-top:1px solid var(--jp-border-color2,#8884)}
.gl-tabs>input:checked+label+.gl-page{display:block}
.gl-tabs .gl-item{margin-bottom:8px}
.gl-tabs img{max-width:100%;height:auto;background:#fff}
.gl-tabs pre{white-space:pre-wrap;margin:0}
</style>"""
#: The tab that a person chose stays when the block is drawn again.
_SCRIPT = """<script>(()=>{{const all=window.gpuLaunchTabs??={{}},box=document.getElementById({0!r});if(!box)return;
const find=rank=>[...box.children].find(e=>e.matches("input")&&e.dataset.ranks.split(" ").includes(rank));
if(all[{0!r}]!==undefined){{const e=find(all[{0!r}]);if(e)e.checked=true}}
box.addEventListener("change",e=>{{all[{0!r}]=e.target.dataset.ranks.split(" ")[0]}})}})()</script>"""


@dataclass(frozen=True, kw_only=True)
class RankDisplay:
    """A display of one rank."""

    rank: int
    node: str
    display: Display
    #: It is the only rank, so that its displays are shown as in a notebook.
    is_only_rank: bool = False


@dataclass(frozen=True)
class _Item:
    html: str
    display_id: str = ""


@dataclass
class _Page:
    """What one rank shows."""

    items: list[_Item] = field(default_factory=list)
    left_out: int = 0
    #: Its items are removed when the next one comes.
    is_cleared: bool = False


class DisplayTabs:
    """The displays of all ranks of one cell."""

    def __init__(self, block_id: str) -> None:
        """`block_id` is the id of the HTML element, which differs from all others of the page."""
        self._id = block_id
        self._pages: dict[int, _Page] = {}
        self._nodes: dict[int, str] = {}

    def add(self, shown: RankDisplay) -> None:
        """Take a display, an update or a clear of a rank."""
        page = self._pages.setdefault(shown.rank, _Page())
        self._nodes[shown.rank] = shown.node
        display = shown.display
        if display.kind is DisplayKind.CLEAR:
            page.is_cleared = True
            if not display.wait:
                self._clear(page)
            return
        item = _Item(render_display(display), display.display_id)
        if display.kind is DisplayKind.UPDATE:
            page.items = [item if item.display_id == old.display_id else old for old in page.items]
            return
        if page.is_cleared:
            self._clear(page)
        page.items.append(item)
        self._drop_oldest(page)

    def render(self) -> str:
        """Return the block; empty while nothing is shown."""
        groups = self._group_equal()
        if not groups:
            return ""
        tabs = "".join(self._render_tab(index, ranks) for index, ranks in enumerate(groups))
        return f'{_STYLE}<div class="gl-tabs" id="{self._id}">{tabs}</div>{_SCRIPT.format(self._id)}'

    def describe(self) -> str:
        """Return the block as one line of text."""
        return ", ".join(
            f"{format_ranks(ranks)}: {format_count(len(self._pages[ranks[0]].items), 'display')}"
            for ranks in self._group_equal()
        )

    def _clear(self, page: _Page) -> None:
        page.items, page.left_out, page.is_cleared = [], 0, False

    def _drop_oldest(self, page: _Page) -> None:
        """Keep to the limits by dropping the oldest displays, of this rank first of all."""
        while len(page.items) > MAX_ITEMS or (len(page.items) > 1 and self._count_characters() > MAX_CHARACTERS):
            del page.items[0]
            page.left_out += 1
        if self._count_characters() > MAX_CHARACTERS:
            page.items[-1] = _Item(f"<pre>[a display of {format_size(len(page.items[-1].html))} is left out]</pre>")

    def _count_characters(self) -> int:
        # Ranks with the same displays share them.
        return sum(len(text) for text in {item.html for page in self._pages.values() for item in page.items})

    def _group_equal(self) -> list[list[int]]:
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, page in sorted(self._pages.items()):
            if page.items:
                groups.setdefault((str(page.left_out), *(item.html for item in page.items)), []).append(rank)
        return list(groups.values())

    def _render_tab(self, index: int, ranks: list[int]) -> str:
        page, name = self._pages[ranks[0]], f"{self._id}-{index}"
        title = html.escape(", ".join(dict.fromkeys(self._nodes[rank] for rank in ranks)))
        listed = " ".join(map(str, ranks))
        label = f"{'rank' if len(ranks) == 1 else 'ranks'} {format_numbers(ranks)}"
        note = f"<p>{format_count(page.left_out, 'earlier display')} not shown</p>" if page.left_out else ""
        items = "".join(f'<div class="gl-item">{item.html}</div>' for item in page.items)
        return (
            f'<input type="radio" name="{self._id}" id="{name}" data-ranks="{listed}"{"" if index else " checked"}>'
            f'<label for="{name}" title="{title}">{label}</label><div class="gl-page">{note}{items}</div>'
        )


def render_display(display: Display) -> str:
    """Return a display as HTML: its own, else an image, else its text. Text from outside is escaped."""
    data = display.data
    if isinstance(text := data.get("text/html"), str):
        return text
    for mime in _IMAGES:
        if isinstance(text := data.get(mime), str):
            return _render_image(mime, text, display.metadata.get(mime))
    if isinstance(text := data.get("image/svg+xml"), str):
        return _render_image("image/svg+xml", base64.b64encode(text.encode()).decode(), None)
    if isinstance(text := data.get("text/latex"), str):
        return html.escape(text)
    for mime in ("text/markdown", "text/plain"):
        if isinstance(text := data.get(mime), str):
            return f"<pre>{html.escape(text)}</pre>"
    return f"<pre>{html.escape(json.dumps(dict(data))[:10_000])}</pre>"


def _render_image(mime: str, content: str, metadata: object) -> str:
    sizes = ""
    if isinstance(metadata, Mapping):
        for name in ("width", "height"):
            if isinstance(pixels := metadata.get(name), int):
                sizes += f' {name}="{pixels}"'
    return f'<img alt="" src="data:{mime};base64,{html.escape("".join(content.split()))}"{sizes}>'
