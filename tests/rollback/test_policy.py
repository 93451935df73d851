"""The table of the recovery policy, row by row."""

from __future__ import annotations

import pytest

from ignite_monitor.rollback.policy import Action, Event, RecoveryPolicy

LETTERS = {"h": Event.HEALTHY, "u": Event.UNHEALTHY, "n": Event.NONFINITE, "t": Event.UNSTABLE, "r": Event.RUINED}
ACTIONS = {".": Action.NONE, "B": Action.ROLL_BACK, "D": Action.DISCARD, "A": Action.ACCEPT, "E": Action.END}


def make_policy():
    return RecoveryPolicy(patience=3, max_rollbacks=2)


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ("hhuuuuuuuuuuh", "............."),  # the triggers decide whether a row is an instability
        ("ht", ".B"),
        ("hr", ".B"),
        ("nnn", "..B"),  # a non-finite batch is left to the train step, three in a row are not
        ("nnunnhnn", "........"),
        ("tuuhuhhhhhu", "BDD.D......"),  # one healthy iteration does not end the recovery, five do
        ("tuhhhhuhhhhhu", "BD....D......"),
        ("tnrt", "BDDD"),
        ("t" + "u" * 52, "B" + "D" * 49 + "A.."),  # accepted 50 iterations after the first sign
        ("uuuuuuuuut" + "u" * 42, "." * 9 + "B" + "D" * 40 + "A."),
        ("t" + "n" * 51, "B" + "D" * 49 + "E."),  # non-finite values are never accepted
        ("t" + "u" * 48 + "nu", "B" + "D" * 49 + "A"),
        ("t" + "u" * 49 + "nnn", "B" + "D" * 49 + "DDE"),
        ("thhhhhthhhhht", "B.....B.....A"),  # max_rollbacks
        ("thhhhhthhhhhr", "B.....B.....E"),
        ("thhhhhthhhhh" + "h" * 988 + "t", "B.....B....." + "." * 988 + "B"),  # the first is 1,000 iterations ago
        ("thhhhhthhhhh" + "h" * 987 + "t", "B.....B....." + "." * 987 + "A"),
    ],
)
def test_table(events, actions):
    policy = make_policy()
    done = [policy.next(LETTERS[letter], i) for i, letter in enumerate(events, start=1)]
    assert done == [ACTIONS[letter] for letter in actions]


@pytest.mark.parametrize("cut", range(1, 14))
def test_it_continues_from_its_state(cut):
    events = [LETTERS[letter] for letter in "tuuhuhhthunuuu"]
    whole, first, second = make_policy(), make_policy(), make_policy()
    expected = [whole.next(event, i) for i, event in enumerate(events)]
    for i, event in enumerate(events[:cut]):
        first.next(event, i)
    second.load_state_dict(first.state_dict())
    assert [second.next(event, cut + i) for i, event in enumerate(events[cut:])] == expected[cut:]
