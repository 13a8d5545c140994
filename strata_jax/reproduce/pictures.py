"""One picture per published table: our figures against theirs, with the band within which a cell passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_jax.report.style import save
from strata_jax.reproduce.compare import Compared, Origin, Verdict
from strata_jax.reproduce.quantities import RULES, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PASS, FAIL, BAND, INK, GRID = "#1b7f6b", "#c4452f", "#1b7f6b", "#30343b", "#d9dce1"
MEMORY = (Quantity.CHUNK, Quantity.SLOTS, Quantity.MIB, Quantity.FREE, Quantity.EVENTS, Quantity.SHARE)
PANEL_INCHES, PANELS_A_ROW = (5.0, 4.6), 3
LARGEST_ERROR = 0.3  # memory errors are drawn up to here

Panel = tuple[str, Callable[["Axes", Sequence[Compared]], None], list[Compared]]


def draw(title: str, cells: Sequence[Compared], path: Path) -> bool:
    """Draw a table's comparison as SVG; False if nothing in it can be drawn. Reads no state and keeps none."""
    shown = [cell for cell in cells if cell.counts and cell.theirs is not None]
    panels = [panel for panel in _panels(shown) if panel[2]]
    if not panels:
        return False
    figure, axes = _figure(len(panels))
    for axis, (name, plot, group) in zip(axes, panels, strict=True):
        plot(axis, group)
        passed = sum(cell.verdict is Verdict.PASS for cell in group)
        axis.set_title(f"{name}: {passed} of {len(group)} pass", fontsize=10, color=INK, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=8)
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    save(figure, path)
    return True


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure without any window system, and its panels in rows of three, or two rows of two."""
    from matplotlib.figure import Figure

    columns = 2 if num_panels == 4 else min(PANELS_A_ROW, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[num_panels:]:
        spare.set_axis_off()
    return figure, axes[:num_panels]


def _panels(cells: Sequence[Compared]) -> list[Panel]:
    def of(*kinds: Quantity, unit: str = "") -> list[Compared]:
        return [cell for cell in cells if cell.quantity in kinds and unit in ("", cell.unit)]

    return [
        ("Memory and events", _errors, of(*MEMORY)),
        ("Prompt, tok/s", _scatter, of(Quantity.PREFILL)),
        ("Prompt time, s", _scatter, of(Quantity.PROMPT_TIME, Quantity.BUCKET_TIME)),
        ("Decode, tok/s", _scatter, of(Quantity.DECODE, unit="tok/s")),
        ("Decode round, ms", _scatter, of(Quantity.DECODE, unit="ms")),
    ]


def _scatter(axis: Axes, cells: Sequence[Compared]) -> None:
    """Theirs across, ours up, both logarithmic; the band is the tolerance, a bar the published range."""
    import matplotlib.ticker as ticker

    values: list[float] = []
    for cell in cells:
        scale = 1e-3 if cell.unit == "ms" and cell.quantity is not Quantity.DECODE else 1.0
        for figure in cell.ours:
            if figure.value is None or cell.theirs is None or figure.value <= 0 or cell.theirs <= 0:
                continue
            x, y = cell.theirs * scale, figure.value * scale
            if cell.bounds is not None:
                ends = [max(bound * scale, 1e-9) for bound in cell.bounds]
                axis.plot(ends, [y, y], color=_color(cell), alpha=0.35, linewidth=1.2)
            axis.scatter(x, y, s=26, **_marker(cell))
            values += [x, y]
    if not values:
        return
    low, high = min(values) * 0.8, max(values) * 1.25
    tolerance = max(RULES[cell.quantity].tolerance for cell in cells if cell.quantity)
    axis.plot([low, high], [low, high], color=INK, linewidth=0.9)
    axis.fill_between([low, high], [low * (1 - tolerance), high * (1 - tolerance)],
                      [low * (1 + tolerance), high * (1 + tolerance)], color=BAND, alpha=0.10, linewidth=0)  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="published", ylabel="ours")
    axis.set_aspect("equal")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        side.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(ticker.NullFormatter())
    axis.tick_params(axis="x", rotation=30)


def _errors(axis: Axes, cells: Sequence[Compared]) -> None:
    """One line per kind; the error across, cells spread out in their order, the tolerance as a bar behind them."""
    kinds = [kind for kind in MEMORY if any(cell.quantity is kind for cell in cells)]
    for place, kind in enumerate(reversed(kinds)):
        group = [cell for cell in cells if cell.quantity is kind and cell.error is not None]
        tolerance = max(RULES[kind].tolerance, 0.002)
        axis.barh(place, 2 * tolerance, left=-tolerance, height=0.8, color=BAND, alpha=0.10, linewidth=0)
        for index, cell in enumerate(group):
            offset = 0.34 * (2 * index / max(1, len(group) - 1) - 1) if len(group) > 1 else 0.0
            error = max(-LARGEST_ERROR, min(LARGEST_ERROR, cell.error or 0.0))
            axis.scatter(error, place + offset, s=22, **_marker(cell))
    axis.set_yticks(range(len(kinds)), [str(kind) for kind in reversed(kinds)])
    axis.axvline(0.0, color=INK, linewidth=0.9)
    worst = max((min(LARGEST_ERROR, abs(cell.error or 0.0)) for cell in cells), default=0.0)
    axis.set_xlim(-max(0.03, worst * 1.1), max(0.03, worst * 1.1))
    axis.set_xlabel(f"ours over published - 1 (drawn up to {LARGEST_ERROR:.0%})")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")


def _color(cell: Compared) -> str:
    return PASS if cell.verdict is Verdict.PASS else FAIL


def _marker(cell: Compared) -> dict[str, Any]:
    """Predictions are filled, fitted rows hollow; failures are red crosses in shape too, not in colour alone."""
    color = _color(cell)
    shape = "o" if cell.verdict is Verdict.PASS else "D"
    face = color if cell.origin is Origin.PREDICTED else "white"
    return {"marker": shape, "facecolors": face, "edgecolors": color, "linewidths": 1.1, "zorder": 3}


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def dot(label: str, color: str, shape: str, filled: bool) -> Line2D:
        face = color if filled else "white"
        return Line2D([], [], linestyle="", marker=shape, color=color, markerfacecolor=face, markersize=6, label=label)

    return [
        dot("predicted, pass", PASS, "o", True),
        dot("fitted on, pass", PASS, "o", False),
        dot("predicted, fail", FAIL, "D", True),
        dot("fitted on, fail", FAIL, "D", False),
        Patch(color=BAND, alpha=0.15, label="tolerance of the kind"),
    ]
