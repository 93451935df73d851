"""Lists of a class's arguments, made from its signature and its docstring."""

import inspect
import re

from metrics import without_roles

import ignite_monitor
from ignite_monitor import scaling


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
    value = getattr(ignite_monitor, name, None) or getattr(scaling, name)
    meanings = described(inspect.getdoc(value))
    lines = []
    for argument, parameter in inspect.signature(value).parameters.items():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}".replace("'", '"')
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        lines.append(f"- `{stars}{argument}{default}`: {without_roles(meanings[argument])}")
    return [*lines, "", f"Types, errors and methods of `{name}`: [API](../api.md)."]
