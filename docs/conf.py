"""Configuration of the documentation site; `make docs` builds it."""

import gpflow_hybrid

project = "gpflow_hybrid"
author = "the gpflow_hybrid developers"
copyright = author
version = release = gpflow_hybrid.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# `make examples` runs the tutorials; the site shows what came out.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings quote names in single or double backticks alike.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"gpflow_hybrid {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> "
exclude_patterns = ["_build"]
nitpicky = False
