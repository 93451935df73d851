"""``python -m ignite_monitor`` is ``ignite-monitor``."""

import sys

from ignite_monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
