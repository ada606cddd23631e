"""Tables in markdown, and a picture of the first. Used by `python -m benches.peers`."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benches.peers import peers
from benches.peers.bars import PLAIN, Bar, Round, behind, ratio
from benches.peers.runner import BURST, FEW, GROUP, Turn


def blobs(size: int, lag: int, rounds: Sequence[Round]) -> str:
    """Medians over rounds of each round's p50: microseconds, CPU and memory, one row per peer."""
    names = list(dict.fromkeys(name for turns in rounds for name in turns))
    rows = [_row(name, size, lag, rounds) for name in names]
    head = "put us|get us|put + get us|x shmrl|read us|lockstep us|x shmrl|in groups us|CPU ms|resident"
    title = f"### {size:,} bytes, consumer {lag} blobs behind"
    legend = f"Lockstep: put + get + read. In groups: put + get per blob of {GROUP} at once."
    return f"{title}\n\n{legend}\n\n{_table(['peer', *head.split('|')], rows)}"


def _row(name: str, size: int, lag: int, rounds: Sequence[Round]) -> list[str]:
    turns = [one[name] for one in rounds if name in one]

    def median(value: Callable[[Turn], float]) -> float:
        return statistics.median(map(value, turns))

    def times(value: Callable[[Turn], float]) -> str:
        found = ratio(rounds, name, PLAIN, value)
        return "-" if found is None else f"{found:.2f}"

    return [
        name,
        f"{median(lambda t: statistics.median(t.behind.put)) * 1e6:.0f}",
        f"{median(lambda t: statistics.median(t.behind.get)) * 1e6:.0f}",
        f"{median(behind) * 1e6:.0f}",
        times(behind),
        f"{median(lambda t: statistics.median(t.behind.read)) * 1e6:.0f}",
        f"{median(lambda t: t.lockstep.total) * 1e6:.0f}",
        times(lambda t: t.lockstep.total),
        f"{grouped * 1e6:.1f}" if (grouped := median(lambda t: t.group_s)) else "-",
        f"{median(lambda t: t.cpu_s) * 1e3:.1f}",
        f"{median(lambda t: t.resident) / (max(lag, 1) * size):.2f}",
    ]


def rates(rounds: Sequence[dict[str, float]]) -> str:
    """put + get + free of 4 KiB blobs in bursts, per second."""
    names = list(dict.fromkeys(name for one in rounds for name in one))
    rows = [[name, f"{statistics.median(one[name] for one in rounds if name in one):,.0f}"] for name in names]
    title = f"### 4 KiB blobs, in bursts of {BURST} ({FEW} of who is slow)"
    return f"{title}\n\n{_table(['peer', 'put + get + free per second'], rows)}"


def copies(size: int, times: dict[str, list[float]]) -> str:
    """put beside memcpy."""
    base = statistics.median(times["memcpy"])
    rows = [[way, f"{(p50 := statistics.median(one)) * 1e6:.0f}", f"{base / p50:.2f}"] for way, one in times.items()]
    return f"### {size:,} bytes into the same warm blocks\n\n{_table(['way', 'us', 'x memcpy'], rows)}"


def bars(found: Sequence[Bar]) -> str:
    """What shmrl promises beside what this run found."""
    rows = [[bar.what, f"{bar.ratio:.2f}", f"{bar.at_least:g}", "yes" if bar.held else "NO"] for bar in found]
    return f"### Promised ratios\n\n{_table(['ratio', 'found', 'at least', 'held'], rows)}"


def footer(rounds: int, steps: int, load: float, failed: dict[str, str]) -> str:
    """Where, when and with which versions; who did not take part, and why."""
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"p50 of {steps} steps a round, medians of {rounds} rounds, peers taking turns within each; "
        "ratios are taken within a round. Every byte compared, outside the timed region. CPU: both processes and a "
        "peer's own daemons, read and comparison included. Resident: growth over the bytes alive.",
    ]
    versions = {k: v for peer in peers.PEERS for k, v in peers.versions(peer).items()}
    lines.append(", ".join(f"{name} {found}" for name, found in versions.items() if found))
    lines += [f"{name}: {why}" for name, why in failed.items()]
    return "\n\n".join(lines)


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.machine()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(path: Path, results: dict[int, Sequence[Round]], lag: int) -> None:
    """put + get per peer and size, as bars on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4), squeeze=False, sharey=True)
    for axis, (size, rounds) in zip(axes[0], results.items(), strict=True):
        names = list(dict.fromkeys(name for turns in rounds for name in turns))[::-1]
        values = [statistics.median(behind(t[name]) for t in rounds if name in t) * 1e3 for name in names]
        drawn = axis.barh(names, values, color=["#2a6f97" if name.startswith("shmrl") else "#b0b7bf" for name in names])
        axis.bar_label(drawn, [f"{value:.2g}" for value in values], padding=3, fontsize=8)
        axis.set_xscale("log")
        axis.margins(x=0.15)
        axis.set_xlabel("put + get, ms (log)")
        axis.set_title(f"{size / 1e6:.1f} MB, consumer {lag} blobs behind", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
