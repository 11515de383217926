"""Configuration of the documentation site; `make docs` builds it."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import gpflow_hybrid

project = "gpflow_hybrid"
author = "The gpflow_hybrid authors"
copyright = author
version = release = gpflow_hybrid.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# `make examples` runs the tutorials; the site shows what came out.
nb_execution_mode = "off"
nb_merge_streams = True
nb_output_stderr = "remove"  # TensorFlow's remarks on the machine
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings quote names in single or double backticks alike.
default_role = "code"
# A setting's fields are explained by its class.
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

# Where there is no network, or an inventory has moved, an empty one takes its place: names stay names, and
# the site is the same but for these links.
EMPTY = "empty.inv"
intersphinx_mapping = {
    "gpflow": ("https://gpflow.github.io/GPflow/develop", (None, EMPTY)),
    "tensorflow": (
        "https://www.tensorflow.org/api_docs/python",
        (
            "https://github.com/GPflow/tensorflow-intersphinx/raw/master/tf2_py_objects.inv",
            EMPTY,
        ),
    ),
    "sklearn": ("https://scikit-learn.org/stable", (None, EMPTY)),
}
intersphinx_timeout = 5

html_theme = "furo"
html_title = f"gpflow_hybrid {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> "
exclude_patterns = ["_build"]

# Formulas as MathML, which browsers draw by themselves: no script, and nothing to load from elsewhere.
html_math_renderer = "mathml"


def mathml(node: nodes.Element, **options: bool) -> str:
    """The node's TeX as MathML, the two habits written out that docutils does not know."""
    tex = re.sub(r"frac(\d)(\d)", r"frac{\1}{\2}", node.astext()).replace(r"\dots", r"\ldots")
    return tex2mathml(tex, **options)


def inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
