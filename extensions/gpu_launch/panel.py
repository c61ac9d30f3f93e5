"""What a launch shows of itself besides its ranks' lines, as HTML for notebooks and as one line of text. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpu_launch.cards import Card, short_uuid
from gpu_launch.render import ranks_text, span_text
from gpu_launch.steps import Bar

#: Of a GPU's memory; above it a sign is shown.
_NEARLY_FULL = 0.95


class RankState(StrEnum):
    """Where a rank is, in the order in which they are shown."""

    FAILED = "failed"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


_SIGNS = {
    RankState.FAILED: "✗",
    RankState.STARTING: "…",
    RankState.RUNNING: "▶",
    RankState.FINISHED: "✓",
    RankState.STOPPED: "■",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """What there is to see besides the line of progress."""

    bars: tuple[Bar, ...] = ()
    cards: tuple[Card, ...] = ()
    ranks: Mapping[RankState, tuple[int, ...]] = field(default_factory=dict)
    #: The line of progress stands alone, is shown at once, and stays.
    is_closing: bool = False


# JupyterLab's own colours, so that it follows the theme; the second values are for other front ends.
_STYLE = """<style>
.gpu-launch{font:var(--jp-ui-font-size1,13px)/1.5 var(--jp-ui-font-family,system-ui,sans-serif);
color:var(--jp-ui-font-color1,inherit);padding:2px 0;max-width:960px;container-type:inline-size}
.gpu-launch .gl-box{border:1px solid var(--jp-border-color2,#8884);border-radius:4px;padding:8px 12px}
.gpu-launch .gl-row{display:flex;gap:4px 14px;align-items:baseline;flex-wrap:wrap}
.gpu-launch .gl-now{font-weight:600;overflow-wrap:anywhere}
.gpu-launch .gl-dim{color:var(--jp-ui-font-color2,inherit);font-variant-numeric:tabular-nums}
.gpu-launch .gl-part{margin-top:8px}
.gpu-launch .gl-label{min-width:120px;overflow-wrap:anywhere}
.gpu-launch .gl-track{background:var(--jp-layout-color2,#8883);border-radius:3px;height:8px;overflow:hidden}
.gpu-launch .gl-track>div{background:var(--jp-brand-color1,#1976d2);height:100%}
.gpu-launch .gl-wide{flex:1 1 180px;align-self:center;height:10px}
.gpu-launch .gl-cards{display:grid;column-gap:18px;row-gap:6px;align-items:end;max-height:420px;overflow-y:auto;
grid-template-columns:minmax(120px,max-content) repeat(3,minmax(0,1fr))}
.gpu-launch .gl-name{align-self:center;overflow-wrap:anywhere}
.gpu-launch .gl-value{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 8px;font-size:.92em;
font-variant-numeric:tabular-nums}
.gpu-launch .gl-bad{color:var(--jp-error-color1,#d32f2f);font-weight:600}
@container (max-width:560px){.gpu-launch .gl-cards{grid-template-columns:repeat(3,minmax(0,1fr))}
.gpu-launch .gl-name{grid-column:1/-1}}
</style>"""


def build_html(text: str, view: View, elapsed: str) -> str:
    """The panel. Everything that is told by others is escaped."""
    dim = f'<span class="gl-dim">{html.escape(elapsed)}</span>' if elapsed else ""
    head = f'<div class="gl-row"><span class="gl-now">{html.escape(text)}</span>{dim}</div>'
    parts = [*map(_bar_html, view.bars), _cards_html(view.cards), _ranks_html(view.ranks)]
    if not any(parts):
        return f'<div class="gpu-launch">{_STYLE}{head}</div>'
    return f'<div class="gpu-launch">{_STYLE}<div class="gl-box">{head}{"".join(parts)}</div></div>'


def build_line(text: str, view: View, elapsed: str) -> str:
    """The same in one line."""
    parts = [text, elapsed]
    parts += [_bar_line(bar) for bar in view.bars[-1:]]
    parts += [_cards_line(view.cards)] if view.cards else []
    failed = view.ranks.get(RankState.FAILED)
    parts += [f"{ranks_text(failed)} failed"] if failed else []
    return " · ".join(" ".join(part.split()) for part in parts if part)


def _bar_html(bar: Bar) -> str:
    text = html.escape(bar.text or "progress")
    track = _track(bar.part, f"{bar.text or 'progress'}", "gl-track gl-wide") if bar.part is not None else ""
    note = f'<span class="gl-dim">{html.escape(bar.note)}</span>' if bar.note else ""
    told = html.escape(" · ".join(filter(None, [_steps_text(bar), _left_text(bar)])))
    told = f'<span class="gl-dim">{told}</span>'
    return f'<div class="gl-row gl-part"><span class="gl-label">{text}</span>{track}{told}{note}</div>'


def _cards_html(cards: tuple[Card, ...]) -> str:
    if not cards:
        return ""
    return f'<div class="gl-cards gl-part">{"".join(map(_card_html, cards))}</div>'


def _card_html(card: Card) -> str:
    used, total = card.memory_mib, card.memory_total_mib
    part = used / total if used is not None and total else None
    memory = "–" if used is None else f"{used / 1024:.1f}" + (f" of {total / 1024:.1f} GiB" if total else " GiB")
    if part is not None and part >= _NEARLY_FULL:
        memory = f"⚠ nearly full, {memory}"
    use = "–" if card.use_percent is None else f"{card.use_percent:.0f} %"
    drawn, limit = card.power_w, card.power_limit_w
    power = "–" if drawn is None else f"{drawn:.0f}" + (f" of {limit:.0f} W" if limit else " W")
    name = f'{html.escape(card.node)} <span class="gl-dim">{html.escape(card.model)}</span>'
    cells = [
        _meter("use", None if card.use_percent is None else card.use_percent / 100, use),
        _meter("memory", part, memory),
        _meter("power", drawn / limit if drawn is not None and limit else None, power),
    ]
    return f'<div class="gl-name" title="{html.escape(short_uuid(card.uuid))}">{name}</div>{"".join(cells)}'


def _meter(name: str, part: float | None, text: str) -> str:
    value = f'<div class="gl-value"><span class="gl-dim">{name}</span><span>{html.escape(text)}</span></div>'
    return f"<div>{value}{_track(part, name, 'gl-track')}</div>"


def _track(part: float | None, name: str, classes: str) -> str:
    percent = 100 * min(1.0, max(0.0, part or 0.0))
    now = f' aria-valuenow="{percent:.0f}"' if part is not None else ""
    return (
        f'<div class="{classes}" role="meter" aria-label="{html.escape(name)}" aria-valuemin="0" aria-valuemax="100"'
        f"{now}>"
        f'<div style="width:{percent:.1f}%"></div></div>'
    )


def _ranks_html(ranks: Mapping[RankState, tuple[int, ...]]) -> str:
    if not ranks:
        return ""
    parts = [
        f'<span class="{"gl-bad" if state is RankState.FAILED else "gl-dim"}">'
        f"{_SIGNS[state]} {ranks_text(ranks[state])} {state}</span>"
        for state in RankState
        if ranks.get(state)
    ]
    return f'<div class="gl-row gl-part">{"".join(parts)}</div>'


def _bar_line(bar: Bar) -> str:
    parts = [f"{bar.text} {_steps_text(bar)}".strip(), _left_text(bar), bar.note]
    return ", ".join(filter(None, parts))


def _cards_line(cards: tuple[Card, ...]) -> str:
    used = [card.use_percent for card in cards if card.use_percent is not None]
    if not used:
        return ""
    least, most = f"{min(used):.0f}", f"{max(used):.0f}"
    return f"{'GPU' if len(cards) == 1 else 'GPUs'} {least if least == most else f'{least}-{most}'} %"


def _steps_text(bar: Bar) -> str:
    """`45 of 100 (45 %)`."""
    step = _number(bar.step)
    if bar.total is None or bar.part is None:
        return step
    return f"{step} of {_number(bar.total)} ({100 * bar.part:.0f} %)"


def _left_text(bar: Bar) -> str:
    return "" if bar.left_s is None or bar.left_s < 1 or bar.is_complete else f"{span_text(bar.left_s)} left"


def _number(value: float) -> str:
    """`45`, `1.5`, `1 200 000`: thousands apart."""
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:,.2f}".replace(",", " ")
