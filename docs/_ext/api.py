"""Lists of public names with their summaries: Sphinx's own, and a table for those who read the page without it."""

import importlib
import inspect
from operator import attrgetter

from metrics import without_roles

AUTOSUMMARY = """\
<!-- sphinx
```{{eval-rst}}
.. currentmodule:: {}

.. autosummary::
   :toctree: api
   :nosignatures:

   {}
```
-->
<!-- without sphinx -->"""


def summaries(module, *names):
    """Return public names of a module with the first sentences of their docstrings."""
    values = [attrgetter(name)(importlib.import_module(module)) for name in names]
    firsts = [" ".join(inspect.getdoc(value).partition("\n\n")[0].split()) for value in values]
    rows = [f"| `{name}` | {without_roles(first)} |" for name, first in zip(names, firsts, strict=True)]
    return [AUTOSUMMARY.format(module, "\n   ".join(names)), "", "| name | |", "|---|---|", *rows]
