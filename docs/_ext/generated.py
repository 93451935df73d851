"""Directives for pages that are generated from the package.

``{arguments} GradMonitor`` makes the table of a class's arguments, ``{monitor-keys} GRADIENT`` that of one schema, and
``{metrics-reference}`` those of all. Their contents are not used: they say where the same text is to those who read the
page without Sphinx.
"""

import inspect

import arguments
import metrics
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from ignite_monitor import keys


class Generated(SphinxDirective):
    """Base of the directives."""

    has_content = True

    def parsed(self, lines, *sources):
        for source in sources:
            self.env.note_dependency(source)
        return self.parse_text_to_nodes(StringList(lines, source=sources[0]), allow_section_headings=True)


class Arguments(Generated):
    """The arguments of one public class, by its name."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        return self.parsed(arguments.listing(name), inspect.getfile(arguments.public(name)[0]), arguments.__file__)


class MonitorKeys(Generated):
    """The keys of one schema, by its name in ``ignite_monitor.keys``."""

    required_arguments = 1

    def run(self):
        schema = getattr(keys, self.arguments[0], None)
        if schema is None:
            raise self.error(f"ignite_monitor.keys has no {self.arguments[0]}")
        return self.parsed(metrics.table(schema), keys.__file__, metrics.__file__)


class MetricsReference(Generated):
    """The keys of all schemas."""

    def run(self):
        return self.parsed(metrics.reference(), keys.__file__, metrics.__file__)


def setup(app):
    app.add_directive("arguments", Arguments)
    app.add_directive("monitor-keys", MonitorKeys)
    app.add_directive("metrics-reference", MetricsReference)
    return {"parallel_read_safe": True}
