"""Run the experiments behind docs/open_questions.md and write their tables into it, between its markers.

    python bench/open_questions.py [--keep DIRECTORY] [name ...]

Each table is a summary of one `grid.csv`; the command that makes the grid stands above the table in the document.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "open_questions.md"
CARDS = {
    "rtx_pro_2000_8gb": "RTX PRO 2000, 8 GB", "rtx3070ti": "RTX 3070 Ti, 8 GB", "rtx5070": "RTX 5070, 12 GB",
    "rtx5060ti": "RTX 5060 Ti, 16 GB", "rtx3090": "RTX 3090, 24 GB", "rtx4090": "RTX 4090, 24 GB",
    "rtx4080s_32gb": "RTX 4080 Super, 32 GB", "rtx5090": "RTX 5090, 32 GB", "h200": "H200, 141 GB",
    "rtx5090_as_16gb": "RTX 5090 as 16 GB",
}  # fmt: skip

Row = Mapping[str, str]


def main() -> None:
    """Make the tables that were asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*TABLES, AUTO, []], help="tables to make; none: all")
    parser.add_argument("--keep", type=Path, help="directory of the runs; those that are there are not repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        for name in arguments.names or (*TABLES, AUTO):
            text = policy_auto(directory) if name == AUTO else TABLES[name](run_experiment(name, directory))
            write_between(DOCUMENT, name, text)
            print(f"{name}\n{text}\n")


def run_experiment(name: str, directory: Path) -> list[Row]:
    """Return the rows of an experiment's grid, simulated unless they are in `directory` already."""
    target = directory / name
    if not (target / "grid.csv").is_file():
        settings = [f"experiment={name}", "report.plots=false", "sweep.plots=false", f"hydra.run.dir={target}"]
        subprocess.run([sys.executable, str(ROOT / "run.py"), *settings], check=True, stdout=subprocess.DEVNULL)
    with (target / "grid.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def own_decide_at(rows: Sequence[Row]) -> str:
    """Layout, prompt rate and free memory by cache size, decided early or late."""
    lines = []
    for reserve, slots in pairs(rows, "hardware.vram_reserve_mib", "cache.slots"):
        filled, final = (
            find(
                rows, **{"hardware.vram_reserve_mib": reserve, "cache.slots": slots, "policy.prefill_own.decide_at": at}
            )
            for at in ("filled", "final")
        )
        early, late = (f"{r['layout']}, {number(r['prompt_tok_s'])}" for r in (filled, final))
        lines.append([reserve, slots, filled["slots"], early, free(filled), late, free(final)])
    heads = [
        "reserve MiB",
        "slots asked",
        "slots",
        "filled: layout, tok/s",
        "free MiB",
        "final: layout, tok/s",
        "free MiB",
    ]
    return markdown(heads, lines)


def own_ab_grid(rows: Sequence[Row]) -> str:
    """Gain of own buffers over borrowed ones, by cache, RAM and prompt length."""
    rows = [r for r in rows if r["policy.prefill_own.decide_at"] == "filled"]
    lengths = list(dict.fromkeys(r["workload.prompt_tokens"] for r in rows))
    lines = []
    for slots, ram in pairs(rows, "cache.slots", "hardware.ram_available_mib"):
        cells = {"cache.slots": slots, "hardware.ram_available_mib": ram}
        gains, own = [], None
        for tokens in lengths:
            base = find(rows, policy="baseline", **{"workload.prompt_tokens": tokens}, **cells)
            own = find(rows, policy="own_prefill", **{"workload.prompt_tokens": tokens}, **cells)
            gains.append(percent(own["prompt_tok_s"], base["prompt_tok_s"]))
        assert own is not None
        lines.append([slots, ram, own["slots"], own["layout"], own["chunk_tokens"], *gains])
    return markdown(
        ["slots asked", "RAM MiB", "slots", "own layout", "chunk", *(f"{int(t):,}" for t in lengths)], lines
    )


def alias_cards(rows: Sequence[Row]) -> str:
    """Time of a document and a question with the head's bytes in three uses, against the plain setting."""
    lines = []
    for card in dict.fromkeys(r["hardware"] for r in rows):
        here = [r for r in rows if r["hardware"] == card]
        plain = find(here, policy="baseline", **{"hardware.vram_reserve_mib": "1024"})
        less = find(here, policy="baseline", **{"hardware.vram_reserve_mib": "702"})
        grown, inside = (find(here, policy="head_alias", **{INSIDE: flag}) for flag in ("False", "True"))
        lines.append([
            name_of(plain), seconds(plain["simulated_s"]), chunk(plain),
            *(t for r in (grown, inside, less) for t in (percent(r["simulated_s"], plain["simulated_s"]), chunk(r))),
        ])  # fmt: skip
    uses = ["larger cache", "inside the head", "smaller reserve"]
    return markdown(["card", "plain s", "chunk", *(text for use in uses for text in (f"{use}: time", "chunk"))], lines)


def alias_crossover(rows: Sequence[Row]) -> str:
    """Least fresh tokens from which on the alias reads faster, as the original does it and natively."""
    lines = []
    for card in dict.fromkeys(r["hardware"] for r in rows):
        here = [r for r in rows if r["hardware"] == card]
        plain = {int(r["workload.prompt_tokens"]): r for r in here if r["policy"] == "baseline"}
        cells = []
        for compat in ("upstream", "native"):
            alias = {
                int(r["workload.prompt_tokens"]): r
                for r in here
                if (r["policy"], r["policy.compat"]) == ("head_alias", compat)
            }
            cells += [crossover(plain, alias), difference(plain, alias, 256), difference(plain, alias, 8_192)]
            cells.append(chunk(next(iter(alias.values()))))
        first = next(iter(plain.values()))
        lines.append([name_of(first), chunk(first), *cells])
    heads = [
        f"{compat}: {text}" for compat in ("original", "native") for text in ("pays from", "256", "8,192", "chunk")
    ]
    return markdown(["card", "plain chunk", *heads], lines)


def alias_threshold(rows: Sequence[Row]) -> str:
    """Time of the agent loop by the threshold, for both ways of loading the head and both uses of its bytes."""
    columns = [(pinned, inside) for pinned in ("True", "False") for inside in ("False", "True")]
    lines = []
    for least in dict.fromkeys(r[LEAST] for r in rows):
        cells = [find(rows, **{LEAST: least, PINNED: pinned, INSIDE: inside}) for pinned, inside in columns]
        lines.append([least, *(f"{seconds(r['simulated_s'])} ({float(r['head_load_ms']) / 1000:,.0f})" for r in cells)])
    heads = [
        f"{'pinned' if pinned == 'True' else 'as the original'}, {'inside' if inside == 'True' else 'larger cache'}"
        for pinned, inside in columns
    ]
    return markdown(["min_fresh_tokens", *heads], lines)


def policy_auto(directory: Path) -> str:
    """What the search chooses for cards and workloads, with its time and the plain setting's."""
    lines = []
    for title, settings in CHOICES.items():
        for workload in ("chat", "doc_follow_up", "agent_loop"):
            found = run_search(
                directory / AUTO / "_".join([*re.findall(r"\w+", title), workload]), [*settings, f"workload={workload}"]
            )
            plain, chosen = found["candidates"][0], found["chosen"]
            before = seconds(str(plain["total_ms"] / 1000)) if plain["fits"] else "does not fit"
            if chosen is None:
                lines.append([title, workload, before, "nothing fits", *["-"] * 4])
                continue
            after = seconds(str(chosen["total_ms"] / 1000))
            cells = (f"{chosen['slots']:,}", f"{chosen['chunk_tokens']:,}", f"{100 * chosen['hit_rate']:.1f} %")
            lines.append([title, workload, before, chosen["label"], after, *cells])
    return markdown(["card", "workload", "plain s", "choice", "s", "slots", "chunk", "hits"], lines)


def run_search(target: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return auto.json of a search. Planning is enough: it searches too, and runs nothing afterwards."""
    if not (target / "auto.json").is_file():
        given = ["policy=auto", "pipeline=plan", *settings, "report.plots=false", f"hydra.run.dir={target}"]
        command = [sys.executable, str(ROOT / "run.py"), *given]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((target / "auto.json").read_text(encoding="utf-8"))
    return found


AUTO = "policy_auto"
LAPTOP = (
    "hardware=rtx_pro_2000_8gb", "quant=iq3_xxs", "kv.type=q4_0", "kv.resident_cells=32768",
    "hardware.vram_reserve_mib=590", "spec.draft_vocab=40525",
)  # fmt: skip
CHOICES: Mapping[str, Sequence[str]] = {
    "RTX 5090": ("hardware=rtx5090",),
    "RTX 5090 as 16 GB": ("hardware=rtx5090_as_16gb",),
    "RTX PRO 2000, 8 GB": ("hardware=rtx_pro_2000_8gb",),
    "the same, published settings": LAPTOP,
}
INSIDE, PINNED, LEAST = (f"policy.head_alias.{name}" for name in ("inside_head", "pinned", "min_fresh_tokens"))
TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "own_decide_at": own_decide_at,
    "own_ab_grid": own_ab_grid,
    "alias_crossover": alias_crossover,
    "alias_threshold": alias_threshold,
    "alias_cards": alias_cards,
}


def write_between(document: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of a table. Raises SystemExit where there are none."""
    old = document.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(old):
        raise SystemExit(f"{document}: no lines `<!-- {name} -->` and `<!-- end -->` to put the table between")
    new = pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", old)
    document.write_text(new, encoding="utf-8")


def markdown(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    body = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body])


def find(rows: Sequence[Row], **wanted: str) -> Row:
    """Return the one row with these settings."""
    (row,) = [r for r in rows if all(r[key] == value for key, value in wanted.items())]
    return row


def pairs(rows: Sequence[Row], first: str, second: str) -> list[tuple[str, str]]:
    """Return the combinations of two settings, in their order."""
    return list(dict.fromkeys((r[first], r[second]) for r in rows))


def crossover(plain: Mapping[int, Row], alias: Mapping[int, Row]) -> str:
    """Return the least tested length from which on no longer one is read slower, or never."""
    slower = [n for n in plain if not (ran(plain[n]) and ran(alias[n])) or faster(plain[n], alias[n]) <= 0.002]
    longer = sorted(n for n in plain if n > max(slower, default=0))
    return f"{longer[0]:,}" if longer else "never"


def faster(plain: Row, alias: Row) -> float:
    return 1 - float(alias["prompt_ms"]) / float(plain["prompt_ms"])


def difference(plain: Mapping[int, Row], alias: Mapping[int, Row], tokens: int) -> str:
    """Return how much longer or shorter the alias reads a prompt of one length."""
    if not ran(plain[tokens]) or not ran(alias[tokens]):
        return "-"
    return percent(alias[tokens]["prompt_ms"], plain[tokens]["prompt_ms"])


def ran(row: Row) -> bool:
    return row["status"] == "ok"


def name_of(row: Row) -> str:
    mark = "" if row["calibrated"] == "True" else " (uncalibrated)"
    return CARDS.get(row["hardware"], row["hardware"]) + mark


def chunk(row: Row) -> str:
    return f"{int(row['chunk_tokens']):,}" if ran(row) else row["status"]


def free(row: Row) -> str:
    return f"{float(row['free_after_start_mib']):,.0f}" if ran(row) else row["status"]


def number(text: str) -> str:
    return f"{float(text):,.0f}" if text else "-"


def seconds(text: str) -> str:
    return f"{float(text):,.1f}" if text else "-"


def percent(value: str, base: str) -> str:
    return f"{100 * (float(value) / float(base) - 1):+.1f} %" if value and base else "-"


if __name__ == "__main__":
    main()
