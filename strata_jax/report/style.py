"""How pictures look: sizes, the colour of every owner of memory, colours of lines. matplotlib is imported on use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_jax.files import replaced_on_success
from strata_jax.memory.ledger import Owner

PANEL_INCHES = (5.6, 3.6)

# distinguishable with the common colour deficiencies (after Okabe and Ito), then two more
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555")

UNCALIBRATED = " (uncalibrated)"  # behind the name of a card without a fit, in every picture


@dataclass(frozen=True, slots=True)
class OwnerGroup:
    """Owners that are drawn as one, and their colour in every picture."""

    name: str
    colour: str
    owners: tuple[Owner, ...]


# From the bottom up: what stays, then those that give each other memory, next to each other.
OWNER_GROUPS: tuple[OwnerGroup, ...] = (
    OwnerGroup("other programs, driver", "#8c8c8c", (Owner.SYSTEM, Owner.LATE)),
    OwnerGroup("dense weights", "#34495e", (Owner.DENSE, Owner.EMBEDDING)),
    OwnerGroup(
        "state, tables, decode buffers", "#7d93a8",
        (Owner.RECURRENT_STATE, Owner.TABLES, Owner.DECODE_BUFFERS, Owner.CHECKPOINTS, Owner.CONVERSATIONS),
    ),
    OwnerGroup("drafter", "#8e6bbf", (Owner.DRAFTER, Owner.DRAFT_BIND)),
    OwnerGroup("head", "#d9534f", (Owner.HEAD,)),
    OwnerGroup("prompt buffers", "#f0a830", (Owner.PROMPT_BUFFERS,)),
    OwnerGroup("K/V and index keys", "#2a9d8f", (Owner.KV, Owner.INDEX_KEYS)),
    OwnerGroup("expert slots", "#4a90d9", (Owner.EXPERT_SLOTS, Owner.BANK, Owner.RESIDENT_COPIES)),
    OwnerGroup("free", "#eef1f4", (Owner.FREE, Owner.RESERVE)),
)  # fmt: skip


def new_figure(num_panels: int, panel_inches: tuple[float, float] = PANEL_INCHES) -> tuple[Any, list[Any]]:
    """Return a figure without any window system, and its panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panel_inches[0] * num_panels, panel_inches[1]), layout="constrained")
    axes = figure.subplots(1, num_panels, squeeze=False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    """Write a figure in one step. In an SVG text stays text, and the same data give the same bytes."""
    from matplotlib import rc_context

    kind = path.suffix.removeprefix(".")
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "strata-jax", "font.family": "sans-serif"}),
        replaced_on_success(path) as unfinished,
    ):
        figure.savefig(unfinished, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
