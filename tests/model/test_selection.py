"""Which names include and exclude pick."""

from __future__ import annotations

import re

import pytest

from ignite_monitor.model.names import Selection

NAMES = ["", "layers.0.attn", "layers.1.attn", "layers.1.mlp", "head"]


@pytest.mark.parametrize(
    ("include", "exclude", "picked"),
    [
        (None, None, NAMES),
        ("attn", None, NAMES[1:3]),
        (r"^layers\.1", r"mlp$", NAMES[2:3]),
        (None, "layers", ["", "head"]),
        (re.compile("HEAD", re.IGNORECASE), None, ["head"]),
        ("", None, NAMES),
    ],
)
def test_picks(include, exclude, picked):
    selection = Selection(include, exclude)
    assert [name for name in NAMES if name in selection] == picked


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_bad_patterns_are_named(argument):
    with pytest.raises(TypeError, match=f"Argument {argument} should be a regular expression or None, but given"):
        Selection(**{argument: 3})
    with pytest.raises(ValueError, match=rf"Argument {argument} should be a regular expression, but given '\(':"):
        Selection(**{argument: "("})
