"""When it goes back, undoes, gives in or ends: the table, row by row."""

from __future__ import annotations

import pytest

from ignite_monitor.rollback.policy import Action, Event, RecoveryPolicy

LETTERS = {"h": Event.HEALTHY, "u": Event.UNHEALTHY, "n": Event.NONFINITE, "t": Event.TROUBLE, "r": Event.RUINED}
ACTIONS = {".": Action.NONE, "B": Action.GO_BACK, "U": Action.UNDO, "A": Action.ACCEPT, "E": Action.END}


def make_course():
    return RecoveryPolicy(patience=3, probation=2, hold=4, max_rollbacks=2, window=20)


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ("hhuuuuuuuuuuh", "............."),  # whether a row is trouble the monitors say
        ("ht", ".B"),
        ("hr", ".B"),
        ("nnn", "..B"),  # a non-finite batch is its own business, not so many in a row
        ("nnunnhnn", "........"),
        ("tuuhuhh", "BUU.U.."),  # one healthy iteration does not end the healing
        ("tuuhhuu", "BUU...."),  # two do
        ("tnrt", "BUUU"),
        ("tuuuuu", "BUUUUA"),  # hold
        ("tuuuuuhu", "BUUUUA.."),
        ("tuhuhuhu", "BU.U.A.."),
        ("tnnnnnn", "BUUUUE."),  # never accepted: what is not finite
        ("trrrrr", "BUUUUE"),
        ("tuuuunu", "BUUUUUA"),  # not finite for once: wait for what can be accepted
        ("tuuuunnn", "BUUUUUUE"),
        ("thhthht", "B..B..A"),  # max_rollbacks
        ("thhthhr", "B..B..E"),
        ("thhthhtthhthht", "B..B..AB..B..A"),  # the count starts afresh
        ("thhthh" + "h" * 14 + "t", "B..B.." + "." * 14 + "B"),  # the first is 20 iterations ago
        ("thhthh" + "h" * 13 + "t", "B..B.." + "." * 13 + "A"),
        ("nnnhhrhhnnn", "..B..B....E"),
    ],
)
def test_table(events, actions):
    course = make_course()
    done = [course.next(LETTERS[letter], i) for i, letter in enumerate(events, start=1)]
    assert done == [ACTIONS[letter] for letter in actions]


@pytest.mark.parametrize("cut", range(1, 14))
def test_it_continues_from_its_state(cut):
    events = [LETTERS[letter] for letter in "tuuhuhhthunuuu"]
    whole, first, second = make_course(), make_course(), make_course()
    expected = [whole.next(event, i) for i, event in enumerate(events)]
    for i, event in enumerate(events[:cut]):
        first.next(event, i)
    second.load_state_dict(first.state_dict())
    assert [second.next(event, cut + i) for i, event in enumerate(events[cut:])] == expected[cut:]
