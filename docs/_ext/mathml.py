"""Formulas as MathML, which browsers render without a script and without a network."""

from docutils import nodes
from latex2mathml.converter import convert


def mathml(node, display):
    return convert(node.astext().replace(r"\_", "_"), display=display)


def visit_inline(translator, node):
    translator.body.append(f'<span class="math">{mathml(node, "inline")}</span>')
    raise nodes.SkipNode


def visit_block(translator, node):
    translator.body.append(f'<div class="math">{mathml(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
