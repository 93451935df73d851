"""The site: ``make docs``, or ``python -m sphinx -W -b html docs build/docs``."""

import inspect
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.util.inspect import stringify_signature

from ignite_monitor import Monitor, ThresholdRule

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "ignite_monitor"
author = "ignite_monitor contributors"
project_copyright = author
version = release = version_of("ignite-monitor")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "mathml",
]
exclude_patterns = ["_ext", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "ignite_monitor"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["figures.css"]
smartquotes_action = "qe"  # two hyphens begin an option of a command
html_copy_source = False

# Titles of every page are targets, and so are those of the README's sections.
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # GitHub removes backslashes between dollars, as in `\,`, but not in a fence
suppress_warnings = ["myst.strikethrough"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_merge_streams = True

autosummary_generate_overwrite = True
# The pages of monitors show what is called; what is overridden is on the pages of Monitor and ThresholdRule.
autosummary_context = {
    "for_users": ["attach", "detach", "log_to"],
    "for_authors": [*dir(Monitor), *dir(ThresholdRule)],
}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def only_for_sphinx(app, docname, source):
    """Take directives out of the comments which hide them from those who read the page without Sphinx."""
    shown = re.sub(r"<!-- without sphinx -->.*?<!-- end -->", "", source[0], flags=re.DOTALL)
    source[0] = re.sub(r"<!-- sphinx\n(.*?)-->", r"\1", shown, flags=re.DOTALL)


def signature_of_class(app, what, name, obj, options, signature, returned):
    """Show the arguments of a monitor: autodoc shows those of ``Reporter.__new__``."""
    if what == "class" and signature == "(*args, **kwargs)":
        return stringify_signature(inspect.signature(obj), show_annotation=False), returned
    return None


def setup(app):
    app.connect("source-read", only_for_sphinx)
    app.connect("autodoc-process-signature", signature_of_class)
