"""A node server as a process: `python -m tests.node.serving ADDRESS PORT [BYTES]`, the token in SHMRL_TOKEN.

With BYTES it kills itself when it has sent so many bytes of a block.
"""

import os
import signal
import sys

from shmrl.arena import Arena
from shmrl.node import http
from shmrl.node.server import NodeServer


def dying(after):
    whole = http.Stream.send_file

    def send_file(self, fd, offset, nbytes):
        whole(self, fd, offset, min(nbytes, after))
        if nbytes > after:
            os.kill(os.getpid(), signal.SIGKILL)

    http.Stream.send_file, http.Stream.copies = send_file, False


def main(address, port, after=""):
    if after:
        dying(int(after))
    with Arena.attach(address) as arena, NodeServer(arena, os.environ["SHMRL_TOKEN"], f"127.0.0.1:{port}"):
        print("up", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
