"""Run `python -m fastdiff`, the same command as `fastdiff`."""

import sys

from fastdiff.cli import main

sys.exit(main())
