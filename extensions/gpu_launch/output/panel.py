"""The panel of a launch, as HTML and as one line of text."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpu_launch.output.progress_bars import ProgressBar
from gpu_launch.output.text import format_exact_span, format_ranks
from gpu_launch.worker.gpu_monitor import GpuSample, shorten_uuid

#: Part of a GPU's memory above which a warning is shown.
_NEARLY_FULL = 0.95


class RankState(StrEnum):
    """State of a rank, in display order."""

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
class PanelView:
    """Contents of the panel below the line of progress."""

    bars: tuple[ProgressBar, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    ranks: Mapping[RankState, tuple[int, ...]] = field(default_factory=dict)
    #: Show only the line of progress, at once; it stays.
    is_closing: bool = False


# JupyterLab's own colours follow the theme; the second values are for other front ends.
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


def build_html(text: str, view: PanelView, elapsed: str) -> str:
    """Build the panel. All text from outside is escaped."""
    dim = f'<span class="gl-dim">{html.escape(elapsed)}</span>' if elapsed else ""
    head = f'<div class="gl-row"><span class="gl-now">{html.escape(text)}</span>{dim}</div>'
    parts = [*map(_render_bar, view.bars), _render_gpus(view.gpus), _render_ranks(view.ranks)]
    if not any(parts):
        return f'<div class="gpu-launch">{_STYLE}{head}</div>'
    return f'<div class="gpu-launch">{_STYLE}<div class="gl-box">{head}{"".join(parts)}</div></div>'


def build_line(text: str, view: PanelView, elapsed: str) -> str:
    """Build the panel as one line of text."""
    parts = [text, elapsed]
    parts += [_format_bar(bar) for bar in view.bars[-1:]]
    parts += [_format_gpus(view.gpus)] if view.gpus else []
    failed = view.ranks.get(RankState.FAILED)
    parts += [f"{format_ranks(failed)} failed"] if failed else []
    return " · ".join(" ".join(part.split()) for part in parts if part)


def _render_bar(bar: ProgressBar) -> str:
    text = html.escape(bar.text or "progress")
    track = (
        _render_track(bar.fraction, f"{bar.text or 'progress'}", "gl-track gl-wide") if bar.fraction is not None else ""
    )
    note = f'<span class="gl-dim">{html.escape(bar.note)}</span>' if bar.note else ""
    status = html.escape(" · ".join(filter(None, [format_steps(bar), format_remaining(bar)])))
    status = f'<span class="gl-dim">{status}</span>'
    return f'<div class="gl-row gl-part"><span class="gl-label">{text}</span>{track}{status}{note}</div>'


def _render_gpus(gpus: tuple[GpuSample, ...]) -> str:
    if not gpus:
        return ""
    return f'<div class="gl-cards gl-part">{"".join(map(_render_gpu, gpus))}</div>'


def _render_gpu(gpu: GpuSample) -> str:
    used, total = gpu.memory_mib, gpu.memory_total_mib
    part = used / total if used is not None and total else None
    memory = "–" if used is None else f"{used / 1024:.1f}" + (f" of {total / 1024:.1f} GiB" if total else " GiB")
    if part is not None and part >= _NEARLY_FULL:
        memory = f"⚠ nearly full, {memory}"
    use = "–" if gpu.use_percent is None else f"{gpu.use_percent:.0f} %"
    drawn, limit = gpu.power_w, gpu.power_limit_w
    power = "–" if drawn is None else f"{drawn:.0f}" + (f" of {limit:.0f} W" if limit else " W")
    name = f'{html.escape(gpu.node)} <span class="gl-dim">{html.escape(gpu.model)}</span>'
    cells = [
        _render_meter("use", None if gpu.use_percent is None else gpu.use_percent / 100, use),
        _render_meter("memory", part, memory),
        _render_meter("power", drawn / limit if drawn is not None and limit else None, power),
    ]
    return f'<div class="gl-name" title="{html.escape(shorten_uuid(gpu.uuid))}">{name}</div>{"".join(cells)}'


def _render_meter(name: str, part: float | None, text: str) -> str:
    value = f'<div class="gl-value"><span class="gl-dim">{name}</span><span>{html.escape(text)}</span></div>'
    return f"<div>{value}{_render_track(part, name, 'gl-track')}</div>"


def _render_track(part: float | None, name: str, classes: str) -> str:
    percent = 100 * min(1.0, max(0.0, part or 0.0))
    now = f' aria-valuenow="{percent:.0f}"' if part is not None else ""
    return (
        f'<div class="{classes}" role="meter" aria-label="{html.escape(name)}" aria-valuemin="0" aria-valuemax="100"'
        f"{now}>"
        f'<div style="width:{percent:.1f}%"></div></div>'
    )


def _render_ranks(ranks: Mapping[RankState, tuple[int, ...]]) -> str:
    if not ranks:
        return ""
    parts = [
        f'<span class="{"gl-bad" if state is RankState.FAILED else "gl-dim"}">'
        f"{_SIGNS[state]} {format_ranks(ranks[state])} {state}</span>"
        for state in RankState
        if ranks.get(state)
    ]
    return f'<div class="gl-row gl-part">{"".join(parts)}</div>'


def _format_bar(bar: ProgressBar) -> str:
    parts = [f"{bar.text} {format_steps(bar)}".strip(), format_remaining(bar), bar.note]
    return ", ".join(filter(None, parts))


def _format_gpus(gpus: tuple[GpuSample, ...]) -> str:
    used = [card.use_percent for card in gpus if card.use_percent is not None]
    if not used:
        return ""
    least, most = f"{min(used):.0f}", f"{max(used):.0f}"
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {least if least == most else f'{least}-{most}'} %"


def format_steps(bar: ProgressBar) -> str:
    """Format as `45 of 100 (45 %)`."""
    step = _format_number(bar.step)
    if bar.total is None or bar.fraction is None:
        return step
    return f"{step} of {_format_number(bar.total)} ({100 * bar.fraction:.0f} %)"


def format_remaining(bar: ProgressBar) -> str:
    """Format as `12 s left`; empty where that is not known or not worth a message."""
    return (
        ""
        if bar.remaining_s is None or bar.remaining_s < 1 or bar.is_complete
        else f"{format_exact_span(bar.remaining_s)} left"
    )


def _format_number(value: float) -> str:
    """Format as `45`, `1.5`, `1 200 000`."""
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:,.2f}".replace(",", " ")
