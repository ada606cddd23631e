"""`python -m shmrl`: the same as the `shmrl` command."""

import sys

from shmrl.cli import main

sys.exit(main())
