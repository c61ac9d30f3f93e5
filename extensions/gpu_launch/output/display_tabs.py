"""What several ranks display, as one block of HTML with a tab for each rank; ranks with the same share a tab."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_launch.common.display_html import render_data
from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.common.widget_html import render_bar, render_row
from gpu_launch.output.panel import format_remaining, format_steps
from gpu_launch.output.progress_bars import ProgressBar
from gpu_launch.output.text import format_count, format_numbers, format_size

#: Maximum number of displays of one rank that are shown; earlier ones are removed.
MAX_ITEMS = 50
#: Maximum number of characters of HTML of all ranks that are shown; earlier displays are removed.
MAX_CHARACTERS = 16_000_000
#: The times and the rate that tqdm writes: ranks whose bars differ in them alone show the same.
_TIMES = re.compile(
    r"\[(?:[\d:?]+(?:&lt;[\d:?]+)?,\s*|[^\[\],]{1,30} left, )?[\d.?]+\s?[^\s,\[\]]{0,15}/[^\s,\[\]]{1,15}"
)
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
    display: Display = field(default_factory=Display)
    #: Progress that the rank has drawn as text; if there is some, this is not a display.
    bars: tuple[ProgressBar, ...] = ()
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
    bars: tuple[ProgressBar, ...] = ()
    left_out: int = 0
    #: Its items are removed when the next one comes.
    is_cleared: bool = False


class DisplayTabs:
    """The displays of all ranks of one cell."""

    def __init__(self, block_id: str, *, noun: str = "rank") -> None:
        """`block_id` is the id of the HTML element, which differs from all others of the page; `noun` names a rank."""
        self._id, self._noun = block_id, noun
        self._pages: dict[int, _Page] = {}
        self._nodes: dict[int, str] = {}
        #: The ranks of each tab that was rendered last.
        self._groups: list[list[int]] = []

    def add(self, shown: RankDisplay) -> None:
        """Take a display, an update or a clear of a rank, or its bars."""
        page = self._pages.setdefault(shown.rank, _Page())
        self._nodes[shown.rank] = shown.node
        if shown.bars:
            page.bars = shown.bars
            return
        display = shown.display
        if display.kind is DisplayKind.CLEAR:
            page.is_cleared = True
            if not display.wait:
                self._clear(page)
            return
        item = _Item(render_data(display.data, display.metadata), display.display_id)
        if display.kind is DisplayKind.UPDATE:
            page.items = [item if item.display_id == old.display_id else old for old in page.items]
            return
        if page.is_cleared:
            self._clear(page)
        page.items.append(item)
        if len(page.items) > MAX_ITEMS:
            self._drop_oldest(page)

    def replace(self, rank: int, items: Sequence[str], bars: tuple[ProgressBar, ...]) -> None:
        """Replace all that a rank shows by displays as HTML, at most MAX_ITEMS, and bars."""
        self._pages[rank] = _Page(items=[_Item(text) for text in items], bars=bars)

    def render(self, *, is_final: bool = False) -> str:
        """Return the block; empty while nothing is shown.

        Ranks that have shown something else keep their own tabs until `is_final`, so that tabs do not come and go.
        """
        self._limit_characters()
        self._groups = self._group_equal(is_final=is_final)
        if not self._groups:
            return ""
        tabs = "".join(self._render_tab(index, ranks) for index, ranks in enumerate(self._groups))
        return f'{_STYLE}<div class="gl-tabs" id="{self._id}">{tabs}</div>{_SCRIPT.format(self._id)}'

    def describe(self) -> str:
        """Return the block that was rendered last as one line of text."""
        return ", ".join(
            f"{self._label(ranks)}: {format_count(len(_list_shown(self._pages[ranks[0]])), 'display')}"
            for ranks in self._groups
        )

    def _clear(self, page: _Page) -> None:
        page.items, page.bars, page.left_out, page.is_cleared = [], (), 0, False

    def _drop_oldest(self, page: _Page) -> None:
        del page.items[0]
        page.left_out += 1

    def _limit_characters(self) -> None:
        """Leave out displays that are too large, then drop the oldest of the rank that shows most."""
        for page in self._pages.values():
            page.items = [_leave_out(item) if len(item.html) > MAX_CHARACTERS else item for item in page.items]
        while self._count_characters() > MAX_CHARACTERS:
            page = max(self._pages.values(), key=lambda page: sum(len(item.html) for item in page.items))
            if len(page.items) > 1:
                self._drop_oldest(page)
            else:
                page.items = [_leave_out(page.items[0])]

    def _count_characters(self) -> int:
        # Ranks with the same displays share them.
        return sum(len(text) for text in {item.html for page in self._pages.values() for item in page.items})

    def _group_equal(self, *, is_final: bool) -> list[list[int]]:
        before = {rank: index for index, ranks in enumerate(self._groups) for rank in ranks}
        groups: list[tuple[tuple[str, ...], list[int]]] = []
        for rank, page in sorted(self._pages.items()):
            if not (shown := _list_shown(page)):
                continue
            content = (str(page.left_out), *(_TIMES.sub("", text) for text in shown))
            for other, ranks in groups:
                known = {before[r] for r in (rank, ranks[0]) if r in before}
                if content == other and (is_final or len(known) < 2):
                    ranks.append(rank)
                    break
            else:
                groups.append((content, [rank]))
        return [ranks for _, ranks in groups]

    def _label(self, ranks: list[int]) -> str:
        return f"{self._noun}{'s' * (len(ranks) > 1)} {format_numbers(ranks)}"

    def _render_tab(self, index: int, ranks: list[int]) -> str:
        page, name = self._pages[ranks[0]], f"{self._id}-{index}"
        title = html.escape(", ".join(dict.fromkeys(self._nodes.get(rank, "") for rank in ranks)))
        listed = " ".join(map(str, ranks))
        label = self._label(ranks)
        note = f"<p>{format_count(page.left_out, 'earlier display')} not shown</p>" if page.left_out else ""
        items = "".join(f'<div class="gl-item">{text}</div>' for text in _list_shown(page))
        return (
            f'<input type="radio" name="{self._id}" id="{name}" data-ranks="{listed}"{"" if index else " checked"}>'
            f'<label for="{name}" title="{title}">{label}</label><div class="gl-page">{note}{items}</div>'
        )


def _leave_out(item: _Item) -> _Item:
    return _Item(f"<pre>[a display of {format_size(len(item.html))} is left out]</pre>", item.display_id)


def _list_shown(page: _Page) -> list[str]:
    """Return what a page shows as HTML, without displays that are empty, such as widgets that were closed."""
    return [*map(_render_progress, page.bars), *(item.html for item in page.items if item.html)]


def _render_progress(bar: ProgressBar) -> str:
    # In tqdm's form, whose times make no difference between ranks.
    figures = ", ".join(filter(None, [format_remaining(bar), *bar.note.split(" · ")]))
    text = f"{format_steps(bar)} [{figures}]" if figures else format_steps(bar)
    if bar.fraction is None:
        return f"<span>{html.escape(f'{bar.text} {text}'.strip())}</span>"
    return render_row(render_bar(bar.text or "progress", bar.fraction, text))
