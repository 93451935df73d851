"""The recovery policy, iteration by iteration."""

from __future__ import annotations

import math

import pytest

from ignite_monitor.rollback.policy import Action, RecoveryPolicy
from ignite_monitor.rollback.snapshots import Snapshots, public
from ignite_monitor.rollback.triggers import Signals

# h: healthy; u: above the threshold; n: not finite; t: triggered; r: state not finite. Losses of 1, 8 and NaN.
LETTERS = {
    "h": {"level": 1.0, "is_usual": True},
    "u": {"is_above": True},
    "n": {"is_nonfinite": True, "level": math.nan},
    "t": {"is_above": True, "reasons": ["a reason"]},
    "r": {"is_nonfinite": True, "level": math.nan, "ruin": "a weight"},
}
H = "h" * 8
ACTIONS = {
    ".": Action.NONE,
    "B": Action.ROLL_BACK,
    "D": Action.DISCARD,
    "T": Action.ADAPT,
    "P": Action.PROBE,
    "R": Action.RESUME,
    "E": Action.END,
}
CHANGED = "h" * 5 + "t" + "u" * 4  # the data change: four tests fail

# Training on them, with a probe of the snapshot; the loss becomes usual.
LEARNT, LEARNT_ACTIONS = "u" * 11 + "h" * 35, "." * 9 + "PR" + "." * 35


def make_policy():
    return RecoveryPolicy(patience=3, max_rollbacks=2)


def follow(policy, events, start=1, level=8.0):
    return [policy.next(Signals(**{"level": level} | LETTERS[letter]), i) for i, letter in enumerate(events, start)]


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ("hhuuuuuuuuuuh", "............."),  # the triggers decide whether a row is an instability
        ("ht", ".B"),
        ("hr", ".B"),
        ("nnn", ".BD"),  # a non-finite batch is left to the train step, half of the patience in a row are not
        ("nunhn", "....."),
        ("th" + "u" + "h" * 8 + "u", "B.D" + "." * 9),  # a healthy iteration does not end the recovery, eight do
        ("th" + "uh" * 60 + "u", "B." + "D." * 60 + "D"),  # the restored weights do well: nothing is ever accepted
        ("tuuhu" + H, "BDD.D" + "." * 8),  # three failed tests do not count if the next one is passed
        ("t" + "huuh" * 4 + "huu", "B" + ".DD." * 4 + ".DT"),  # five failed tests of ten: noisier data
        ("tnrt", "BDDD"),
        ("t" + "n" * 120, "B" + "D" * 119 + "E"),  # non-finite values are never accepted
        (f"t{H}t{H}t{H}t", "B........B........D........D"),  # max_rollbacks
        (f"t{H}t{H}r", "B........B........E"),
        (f"t{H}t" + "h" * 990 + "t", "B........B" + "." * 990 + "B"),  # the first is 1,000 iterations ago
        (f"t{H}t" + "h" * 989 + "t", "B........B" + "." * 989 + "D"),
        (CHANGED + "u" * 10, ".....BDDDT" + "." * 9 + "P"),
        (CHANGED + "u" * 10 + "u", ".....BDDDT" + "." * 9 + "P" + "R"),
        (
            CHANGED + "u" * 10 + "hhhh" + H,
            ".....BDDDT" + "." * 9 + "P" + "." * 12,
        ),  # the earlier data are back
        (CHANGED + "u" * 10 + "hhhu", ".....BDDDT" + "." * 9 + "P" + "...R"),
        (CHANGED + "u" * 3 + "t", ".....BDDDT" + "..." + "D"),  # training on the changed data diverges
        (CHANGED + "h" * 8 + "t", ".....BDDDT" + "." * 8 + "D"),  # learnt, and not final yet
        (CHANGED + LEARNT + "ht", ".....BDDDT" + LEARNT_ACTIONS + ".B"),  # learnt, and final
        (CHANGED + LEARNT[:-1] + "uu", ".....BDDDT" + LEARNT_ACTIONS[:-1] + "PR"),  # unusual in that moment
    ],
)
def test_table(events, actions):
    assert follow(make_policy(), events) == [ACTIONS[letter] for letter in actions]


def test_rollbacks_are_counted_through_accepted_data():
    policy = make_policy()
    events = CHANGED + H + "ht" + H + "h" * 5 + "t"
    assert follow(policy, events).count(Action.ROLL_BACK) == 2


@pytest.mark.parametrize(("before", "keeps"), [(8.7, True), (8.9, False)])
def test_the_state_before_the_rollback_is_kept_if_it_does_as_well_on_the_changed_data(before, keeps):
    policy = make_policy()
    follow(policy, "uuuut", level=before)
    follow(policy, "uuuu", start=6)
    assert policy.keeps_current == keeps


def test_older_snapshots_are_restored_after_two_failed_tests_or_four_failed_trainings():
    policy, tested = make_policy(), []
    for letter in "tuuuu":
        follow(policy, letter)
        tested.append(policy.candidate)
    assert tested == [0, 0, 1, 1, 0]  # the new batches are learnt from the newest one
    policy = make_policy()
    follow(policy, "th")
    retried = []
    for i in range(12):
        follow(policy, "u", start=3 + 2 * i)
        retried.append(policy.candidate)
        follow(policy, "h", start=4 + 2 * i)
    assert retried == [0] * 3 + [1] * 4 + [2] * 4 + [3]


@pytest.mark.parametrize("cut", range(1, 24))
def test_it_continues_from_its_state(cut):
    events = "tuuhuhhthunuuuuuuhuuuuuuu"
    whole, first, second = make_policy(), make_policy(), make_policy()
    expected = follow(whole, events)
    follow(first, events[:cut])
    vars(second).update(public(first))
    assert follow(second, events[cut:], start=cut + 1) == expected[cut:]


@pytest.mark.parametrize(("first_sign", "restored"), [(100, 95), (97, 90), (95, 85), (91, 80), (40, 0)])
def test_the_restored_snapshot_is_older_than_the_first_sign_by_more_than_the_delay(first_sign, restored):
    snapshots = Snapshots(every=5)
    snapshots.all = [{"iteration": i, "thresholds": i} for i in range(0, 101, 5)]
    snapshots.start(100, first_sign)
    assert [snapshots.choose(100, candidate)["iteration"] for candidate in (0, 1)] == [restored, max(0, restored - 5)]
    assert snapshots.choose(100, len(snapshots.all))["iteration"] == restored  # the newest after the oldest
    assert {snapshot["thresholds"] for snapshot in snapshots.all} == {(first_sign - 2) // 5 * 5}
