"""`python -m benches.peers`: blobs of 6.3 and 16.8 MB and small ones through every peer that is installed, in rounds.

Ten minutes in full on an idle machine; `--quick` shows that everything works, with figures that say little. A peer
that failed sits out later rounds, and the exit code is 1 then. `pip install -e '.[peers]'` installs the peers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from benches.peers import bars, copying, peers, report, runner
from benches.peers.interface import Peer

ENCODABLE = 48 * 8  # a row of routing: shmrl, encode takes whole rows


def main() -> int:
    options = _parse()
    load = os.getloadavg()[0]
    failed = _missing(options.peers)
    taking_part = [peer for peer in options.peers if peer.name not in failed]
    results: dict[int, list[bars.Round]] = {size: [{} for _ in range(options.rounds)] for size in options.sizes}
    small: list[dict[str, float]] = [{} for _ in range(options.rounds)]
    for number in range(options.rounds):
        _say(f"round {number + 1} of {options.rounds}")
        for peer in taking_part:
            if peer.name in failed:
                continue
            try:
                with runner.pair(peer) as two:
                    for size in options.sizes:
                        if peer.name != bars.ENCODE or size % ENCODABLE == 0:
                            results[size][number][peer.name] = runner.turn(
                                two, size, options.lag, options.steps, groups=peer.name in bars.GROUPED
                            )
                    if peer.name != bars.ENCODE:
                        small[number][peer.name] = runner.rate(two)
            except Exception as error:  # is reported, and the others go on
                failed[peer.name] = f"failed: {(str(error).strip() or repr(error)).splitlines()[-1]}"
            _say(f"  {peer.name}: {failed.get(peer.name, 'done')}")
    text = _write(options, results, small, load, failed)
    print(text)
    if options.plot:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "peers.md").write_text(text)
        report.plot(options.out / "peers.png", results, options.lag)
    return int(any(why != NOT_INSTALLED for why in failed.values()))


NOT_INSTALLED = "not installed"


def _missing(wanted: list[Peer]) -> dict[str, str]:
    return {peer.name: NOT_INSTALLED for peer in wanted if None in peers.versions(peer).values()}


def _write(options: argparse.Namespace, results, small, load: float, failed: dict[str, str]) -> str:
    parts, promised = ["## Handing a blob from one process to another"], []
    for size, rounds in results.items():
        parts.append(report.blobs(size, options.lag, rounds))
        found = bars.of_blobs(rounds)
        promised += [bars.Bar(f"{size / 1e6:.1f} MB: {bar.what}", bar.ratio, bar.at_least) for bar in found]
    parts.append(report.rates(small))
    promised += bars.of_rates(small)
    for size in results:
        times = copying.copies(size, options.steps * options.rounds)
        parts.append(report.copies(size, times))
        for way, bar in (("put", 1.3), ("put, checksums", 1.0)):
            promised.append(bars.Bar(f"{size / 1e6:.1f} MB: {way} / memcpy", copying.median_ratio(times, way), bar))
    pairs = statistics.median(copying.together(0.3, options.rounds))
    promised.append(bars.Bar("4 KiB put + free per second, two processes / one", pairs, 1))
    parts.append(report.bars(promised))
    parts.append(report.footer(options.rounds, options.steps, load, failed))
    return "\n\n".join(parts) + "\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of few steps with smaller blobs")
    parser.add_argument("--peers", help="names, separated by ';'", default=";".join(p.name for p in peers.PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each turn")
    parser.add_argument("--lag", type=int, default=40, help="blobs that the consumer is behind")
    parser.add_argument("--plot", action="store_true", help="write peers.md and peers.png")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    options.sizes = [6_291_456, 16_777_216]
    if options.quick:
        options.sizes, options.rounds, options.steps, options.lag = [786_432], 1, 5, 4
    try:
        options.peers = [peers.find(name.strip()) for name in options.peers.split(";")]
    except StopIteration:
        parser.error(f"--peers: no such one; there are {'; '.join(p.name for p in peers.PEERS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
