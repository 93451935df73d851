"""Lists of a class's arguments, made from its signature and its docstring."""

import inspect
import re

from metrics import roles

import ignite_monitor
from ignite_monitor import scaling


def public(name):
    """Return a public class or function by its name, and the module that exports it."""
    module = next(module for module in (ignite_monitor, scaling) if hasattr(module, name))
    return getattr(module, name), module.__name__


def described(docstring):
    """Return argument -> meaning, from the section "Args:" of a docstring."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    meanings = {}
    for line in section.splitlines():
        start = re.match(r" {4}\**(\w+): (.*)", line)
        if start:
            name = start[1]
            meanings[name] = start[2]
        else:
            meanings[name] += " " + line.strip()
    return meanings


def listing(name):
    """Return the arguments of a public class, with their defaults and meanings, as a list in Markdown."""
    value, module = public(name)
    meanings = described(inspect.getdoc(value))
    lines = []
    for argument, parameter in inspect.signature(value).parameters.items():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}".replace("'", '"')
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        meaning = re.sub(r":(class|func):`(\w+)`", rf":\1:`~{module}.\2`", meanings[argument])
        meaning = re.sub(r":meth:`(\w+)`", rf":meth:`~{module}.{name}.\1`", meaning)
        lines.append(f"- `{stars}{argument}{default}`: {roles(meaning)}")
    return [*lines, "", f"Types, errors and methods: {{class}}`~{module}.{name}`."]
