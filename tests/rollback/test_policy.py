"""The table of the recovery policy, row by row."""

from __future__ import annotations

import pytest

from ignite_monitor.rollback.policy import Action, Event, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshots

LETTERS = {"h": Event.HEALTHY, "u": Event.UNHEALTHY, "n": Event.NONFINITE, "t": Event.UNSTABLE, "r": Event.RUINED}
H = "h" * 8
ACTIONS = {".": Action.NONE, "B": Action.ROLL_BACK, "D": Action.DISCARD, "A": Action.ACCEPT, "E": Action.END}


def make_policy():
    return RecoveryPolicy(patience=3, max_rollbacks=2)


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ("hhuuuuuuuuuuh", "............."),  # the triggers decide whether a row is an instability
        ("ht", ".B"),
        ("hr", ".B"),
        ("nnn", ".BD"),  # a non-finite batch is left to the train step, half of the patience in a row are not
        ("nunhn", "....."),
        ("tuuhu" + "h" * 8 + "u", "BDD.D" + "." * 9),  # one healthy iteration does not end the recovery, eight do
        ("tu" + "h" * 7 + "u" + "h" * 8 + "u", "BD" + "." * 7 + "D" + "." * 9),
        ("tnrt", "BDDD"),
        ("t" + "u" * 50, "B" + "D" * 47 + "A.."),  # accepted 48 iterations after the first sign
        ("t" + "n" * 49, "B" + "D" * 47 + "E."),  # non-finite values are never accepted
        ("t" + "u" * 46 + "nu", "B" + "D" * 47 + "A"),
        ("t" + "u" * 46 + "nnn", "B" + "D" * 46 + "DDE"),
        (f"t{H}t{H}t", "B........B........A"),  # max_rollbacks
        (f"t{H}t{H}r", "B........B........E"),
        (f"t{H}t{H}nnn", "B........B..........E"),  # here all of it
        (f"t{H}t" + "h" * 990 + "t", "B........B" + "." * 990 + "B"),  # the first is 1,000 iterations ago
        (f"t{H}t" + "h" * 989 + "t", "B........B" + "." * 989 + "A"),
    ],
)
def test_table(events, actions):
    policy = make_policy()
    done = [policy.next(LETTERS[letter], i) for i, letter in enumerate(events, start=1)]
    assert done == [ACTIONS[letter] for letter in actions]


def test_a_slow_trigger_counts_from_its_first_sign():
    policy = make_policy()
    assert policy.next(Event.UNSTABLE, 60, age=15) == Action.ROLL_BACK
    done = [policy.next(Event.UNHEALTHY, i) for i in range(61, 96)]
    assert done == [Action.DISCARD] * 33 + [Action.ACCEPT, Action.NONE]


@pytest.mark.parametrize("cut", range(1, 14))
def test_it_continues_from_its_state(cut):
    events = [LETTERS[letter] for letter in "tuuhuhhthunuuu"]
    whole, first, second = make_policy(), make_policy(), make_policy()
    expected = [whole.next(event, i) for i, event in enumerate(events)]
    for i, event in enumerate(events[:cut]):
        first.next(event, i)
    vars(second).update({name: getattr(first, name) for name in RecoveryPolicy.SAVED})
    assert [second.next(event, cut + i) for i, event in enumerate(events[cut:])] == expected[cut:]


@pytest.mark.parametrize(("first_sign", "margin", "restored"), [(95, 0, 90), (92, 0, 90), (91, 0, 85), (91, 18, 70)])
def test_the_restored_snapshot_is_older_than_the_first_sign_and_the_margin(first_sign, margin, restored):
    snapshots = Snapshots(every=5, keep=20, on_host=False)
    snapshots.all = [{"iteration": i, "thresholds": {}} for i in range(0, 101, 5)]
    assert snapshots.choose(100, first_sign, 0, margin)["iteration"] == restored
