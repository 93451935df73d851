"""``.. monitor-keys:: GRADIENT``: the table of what a monitor publishes, made from its schema."""

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from ignite_monitor import keys


class MonitorKeys(SphinxDirective):
    """The keys of one schema, by its name in ``ignite_monitor.keys``."""

    required_arguments = 1

    def run(self):
        schema = getattr(keys, self.arguments[0], None)
        if schema is None:
            raise self.error(f"ignite_monitor.keys has no {self.arguments[0]}")
        self.env.note_dependency(keys.__file__)
        return self.parse_text_to_nodes(StringList(schema.table().splitlines(), source=keys.__file__))


def setup(app):
    app.add_directive("monitor-keys", MonitorKeys)
    return {"parallel_read_safe": True}
