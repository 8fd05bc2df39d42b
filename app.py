"""The web page, as `fastdiff ui` serves it. Run `python app.py`, or `make ui`, which installs what it needs first."""

import sys

from fastdiff.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "ui")
    sys.exit(main())
