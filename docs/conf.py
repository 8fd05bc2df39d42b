"""The configuration of the documentation, which `make docs` builds with Sphinx.

Sphinx is the generator because autodoc imports `fastdiff` and reads the docstrings, which keep the Google style, so a
public name is described once, beside its code. myst-parser reads the pages, which are Markdown, and furo is the theme.

A build needs no network: intersphinx is off, and nothing checks external links. Names of torch, PIL and Python in
signatures therefore have no link.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from fastdiff import __version__

project = "fastdiff"
author = "The fastdiff developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "fastdiff_tables"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
default_role = "code"
highlight_language = "text"
pygments_style = "friendly"

myst_heading_anchors = 3  # so that page.md#a-heading is a link
myst_links_external_new_tab = False

maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

# Names in signatures that have no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|PIL|collections|concurrent|typing|pathlib|os)\..*"),
    (r"py:class", r"fastdiff\..*\.(Any\w+|Accelerated)"),  # type variables
    (r"py:class", r"fastdiff\.checkpoints\.configs\.denoiser\.DenoiserConfig"),
    (r"py:class", r"fastdiff\.(models\.coding\.Autoencoder|checkpoints\.saving\.FrozenDict)"),  # base classes
]

html_theme = "furo"
html_title = f"fastdiff {release}"
html_copy_source = False
html_show_copyright = False
