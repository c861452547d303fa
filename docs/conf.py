"""The site: `tox -e docs` builds it, and a warning is an error."""

import re
from pathlib import Path

project = "edgeless"
author = "The edgeless maintainers"
ROOT = Path(__file__).resolve().parent.parent
release = re.search(r'^__version__ = "(.+)"$', (ROOT / "shared" / "__init__.py").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["runs", "reference-layers.txt"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Graph layers that never write an edge tensor"}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes and dtypes
napoleon_google_docstring = True
napoleon_custom_sections = [("Shapes", "notes_style"), ("Shape", "notes_style")]
# Pages link to sources and tests beside docs/, which are no pages; tests/packaging/test_documents.py checks all links.
suppress_warnings = ["myst.xref_missing"]
