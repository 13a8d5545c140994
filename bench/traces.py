"""What one NVIDIA GPU did while a call ran: launches, busy time, gaps, the kernels that took longest."""

from __future__ import annotations

import gzip
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DEVICE_PLANE = "/device:GPU:0"


def traced(call: Callable[[], Any], keep: Path | None = None) -> Path:
    """Run the call under JAX's profiler; returns the file of events, also packed to ``keep``.gz where it is given."""
    import jax

    folder, options = tempfile.mkdtemp(), jax.profiler.ProfileOptions()
    # every Python call of 48 layers would be an event, and their programs alone 28 MB
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    with jax.profiler.trace(folder, profiler_options=options):
        jax.block_until_ready(call())
    [path] = Path(folder).rglob("*.xplane.pb")
    if keep is not None:
        keep.with_name(keep.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    return path


def device_events(path: Path) -> list[tuple[str, float, float]]:
    """Kernels and copies as (name, start, end) in microseconds, in the order of their starts."""
    import jax

    data = jax.profiler.ProfileData.from_file(str(path))
    plane = data.find_plane_with_name(DEVICE_PLANE)
    lines = [] if plane is None else [line for line in plane.lines if line.name.startswith("Stream")]
    events = [(e.name, e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3) for line in lines for e in line.events]
    return sorted(events, key=lambda event: event[1])


def host_us(path: Path, name: str) -> list[float]:
    """Microseconds of each event of that name on the host, such as XLA's ``command_buffer::update``."""
    import jax

    planes = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if plane.name == "/host:CPU"]
    return [e.duration_ns / 1e3 for plane in planes for line in plane.lines for e in line.events if e.name == name]


def busy_us(events: Iterable[tuple[str, float, float]]) -> float:
    """Microseconds in which at least one event ran."""
    total, until = 0.0, 0.0
    for _, start, end in events:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernel_us(call: Callable[[], Any], names: Iterable[str], calls: int = 1) -> dict[str, float]:
    """Microseconds that the kernels whose names begin so took in a call, of ``calls`` that one ``call`` makes."""
    total = dict.fromkeys(names, 0.0)
    for name, start, end in device_events(traced(call)):
        for wanted in total:
            total[wanted] += name.startswith(wanted) * (end - start) / calls
    return total


def trace_numbers(path: Path, calls: int) -> dict[str, Any]:
    """Launches and busy milliseconds of a call, the median kernel, and the names that took most of the time."""
    events = device_events(path)
    took: Counter[str] = Counter()
    for name, start, end in events:
        took[name] += end - start
    counts = Counter(name for name, _, _ in events)
    span = max((end for _, _, end in events), default=0.0) - (events[0][1] if events else 0.0)
    changed = host_us(path, "command_buffer::update")
    return {
        "recordings_changed": len(changed) / calls, "recordings_changed_ms": sum(changed) / calls / 1e3,
        "launches": len(events) / calls, "busy_ms": busy_us(events) / calls / 1e3, "span_ms": span / calls / 1e3,
        "longest": [
            {"name": name[:60], "us": us / counts[name], "times": counts[name] / calls, "ms_a_call": us / calls / 1e3}
            for name, us in took.most_common(40)
        ],
    }  # fmt: skip
