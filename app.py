"""Serve the web page, like `fastdiff ui`. Run `python app.py`, or `make ui`, which first installs the dependencies."""

import sys

from fastdiff.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "ui")
    sys.exit(main())
