"""Configuration of the documentation site: `make docs` builds it into build/site."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import esper  # noqa: E402 - the checkout's package, not an installed one

project = "Esper"
copyright = "the authors of Esper, MIT licence"
release = esper.__version__
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]
smartquotes = False  # `--option` stays as it is
highlight_language = "none"  # a block without a language is plain text

# Markdown
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test executes the notebooks; the site shows their stored outputs
nb_merge_streams = True

# API pages
autodoc_typehints = "none"  # signatures name the arguments, docstrings describe them
default_role = "code"  # `name` in a docstring is code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# HTML: everything is local
html_theme = "furo"
html_title = f"Esper {release}"
html_static_path = ["_static"]
html_css_files = ["esper.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f43", "color-brand-content": "#1f6f43"},
    "dark_css_variables": {"color-brand-primary": "#7fd1a0", "color-brand-content": "#7fd1a0"},
}
