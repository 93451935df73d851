"""One detector for all tensors, against the contract's rule for each."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from ignite_monitor import GradMonitor
from ignite_monitor.gradient.detector import PerParameterDetector
from ignite_monitor.gradient.publication import culprits, named
from tests._helpers import assert_same, make_step, mlp_batches, train
from tests._models import make_mlp

NAMES = ("embed", "qkv", "bias", "head")


def norms_of(n, seed=0):
    random = np.random.default_rng(seed)
    return random.lognormal(sigma=0.3, size=(n, 4)) * [5.0, 1.0, 1e-5, 30.0]


def detected(rows, detector=None):
    detector, results = detector or PerParameterDetector(), []
    for row in rows:
        detection = detector.detect(NAMES, torch.tensor(np.nan_to_num(row)))
        detector.observe(detection)
        results.append(
            [*zip(detection.spike.tolist(), detection.applied_threshold.nan_to_num(math.inf).tolist(), strict=True)]
        )
    return results


def shares_of(detection):
    return named(culprits(detection).tolist(), NAMES)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_norms_are_spikes_of_their_tensors_and_leave_no_trace(bad):
    rows, detector = norms_of(60), PerParameterDetector()
    detected(rows, detector)
    limits = detector.detect(NAMES, torch.ones(4, dtype=torch.float64)).rule_threshold.tolist()
    detection = detector.detect(NAMES, torch.tensor([1.0, bad, 1e-5, bad], dtype=torch.float64))
    detector.observe(detection)
    assert detection.spike.tolist() == [False, True, False, True]
    assert shares_of(detection) == {"qkv": 0.5, "head": 0.5}
    after = detector.detect(NAMES, torch.ones(4, dtype=torch.float64)).rule_threshold.tolist()
    assert [one == other for one, other in zip(limits, after, strict=True)] == [False, True, False, True]


def test_the_shares_of_the_excess():
    detector = PerParameterDetector()
    detected(norms_of(100), detector)
    threshold = detector.detect(NAMES, torch.ones(4, dtype=torch.float64)).applied_threshold.tolist()
    mean = detector.detect(NAMES, torch.ones(4, dtype=torch.float64)).mean.tolist()
    over = torch.tensor([threshold[0] + 3.0, threshold[1] + 1.0, mean[2] * 0.9, mean[3] * 0.5])
    detection = detector.detect(NAMES, over.double())  # most are below their means, so nothing is shared
    assert shares_of(detection) == pytest.approx({"embed": 0.75, "qkv": 0.25})
    # All within their thresholds: what is above the means.
    mean = detection.mean
    detection = detector.detect(NAMES, mean * torch.tensor([1.2, 1.0, 1.0, 0.9]) + torch.tensor([0.0, 0.25, 0.0, 0.0]))
    excess = {"embed": 0.2 * mean[0].item(), "qkv": 0.25}
    assert shares_of(detection) == pytest.approx({name: part / sum(excess.values()) for name, part in excess.items()})


def test_state_continues_for_the_same_names_and_begins_anew_for_others():
    rows = norms_of(120)
    rows[70, 0] *= 30
    whole, first, second = (PerParameterDetector() for _ in range(3))
    expected = detected(rows, whole)
    detected(rows[:60], first)
    second.load_state_dict(first.state_dict())
    assert detected(rows[60:], second) == expected[60:]
    third = PerParameterDetector()
    third.load_state_dict(first.state_dict())
    detection = third.detect(NAMES, torch.tensor(rows[70]))
    assert dict(zip(third.names, detection.spike.tolist(), strict=True))["embed"]
    assert not second.detect(NAMES[:3], torch.tensor(rows[70][:3])).spike.any()
    assert second.state_dict()["count"].tolist() == [0, 0, 0]


def test_the_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="upper"):
        PerParameterDetector().load_state_dict({"names": NAMES})
    monitor = GradMonitor(model := make_mlp(), per_parameter=True)
    train(make_step(model, torch.optim.SGD(model.parameters(), lr=1e-3)), mlp_batches(30), monitor)
    before, other = monitor.state_dict(), copy.deepcopy(monitor.state_dict())
    other["detector"]["count"] += 1
    for score, error in ((torch.zeros(2), ValueError), ("text", TypeError)):
        wrong = other | {"per_parameter": {"names": ["a"], "spike_score": score}}
        with pytest.raises(error):
            monitor.load_state_dict(wrong)
        assert_same(dict(monitor.state_dict()), dict(before))
    assert before["per_parameter"]["count"].tolist() == [30] * 4


def test_nothing_is_read_on_the_host_and_operations_do_not_grow_with_the_tensors():
    def operations(n):
        detector, counted = PerParameterDetector(), []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counted.append(function)
                return function(*args, **(kwargs or {}))

        names = tuple(str(i) for i in range(n))
        for _ in range(3):
            counted.clear()
            with Count():
                detection = detector.detect(names, torch.zeros(n, dtype=torch.float64, device="meta"))
                culprits(detection)
                detector.observe(detection)
        return len(counted)

    assert operations(3) == operations(300)


def test_norms_on_another_device_than_those_before():
    detector = PerParameterDetector()
    detected(norms_of(30), detector)
    detection = detector.detect(NAMES, torch.ones(4, dtype=torch.float64, device="meta"))
    detector.observe(detection)
    assert detection.spike.is_meta
    assert detector.rows.is_meta
