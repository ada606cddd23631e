"""`python -m shmrl`, and the `shmrl` command: until `main` runs, Ctrl-C ends the process without a traceback."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else: nohup, or an embedder's own
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    from shmrl.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
