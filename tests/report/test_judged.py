"""What was judged and what was not, what counts from the first measurement on, and which causes are named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ignite_monitor.report.summary import find, healthy, measured
from ignite_monitor.report.weights import together
from tests.report import _runs as runs
from tests.report._runs import tidy
from tests.report.test_findings import found, only, rcc, with_stepped


def without(run, *metrics):
    return {name: series for name, series in run.items() if not name.endswith(metrics)}


# What was judged


def test_a_run_in_its_warm_up_is_not_called_healthy():
    run = without(runs.grad(runs.calm_norms(15)), "threshold") | {"grad/mean": runs.series(np.ones(15))}
    findings = find(tidy(run))
    assert [(each.kind, each.severity) for each in findings] == [("not_monitored", "note")]
    assert (
        "None of 15 gradient norms (grad/norm) was compared with a threshold: the threshold's warm-up"
        in findings[0].text
    )
    assert healthy(findings) is None


def test_without_a_monitor_of_gradients_a_run_is_not_called_healthy():
    findings = find(tidy(without(runs.healthy(), "norm", "spike")))
    assert healthy(findings) is None
    assert "the file has no metrics of a GradMonitor" in findings[0].text
    assert healthy(find(tidy(runs.healthy()))) is True


def test_a_monitor_whose_optimizer_makes_no_step_has_judged_nothing():
    run = without(runs.grad(runs.calm_norms(300)), "threshold") | runs.weights()
    run |= {"grad/stepped": runs.series(np.zeros(300))}
    finding = only(run, "no_step")
    assert finding.severity == "warning"
    assert "optimizer made no step in 300 monitored iterations" in finding.text
    assert "Give GradMonitor the optimizer whose step()" in finding.action
    assert healthy(find(tidy(run))) is False


def test_no_norm_may_be_published_without_a_step():
    assert only({"grad/stepped": runs.series(np.zeros(300))}, "no_step").values["count"] == 300
    short = {"grad/stepped": runs.series(np.zeros(3))}  # of an accumulation over 4
    assert healthy(find(tidy(short))) is None
    assert found(short, "no_step") == []


def test_a_run_of_spikes_that_were_all_skipped_has_a_right_optimizer():
    run = runs.grad(np.full(300, 60.0), range(1, 301))
    assert found(with_stepped(run, range(1, 301)), "no_step") == []


# Accumulation


def test_spikes_of_partial_gradients_count_once_per_step():
    """Four micro-batches a step: 27 gradients are flagged, in 11 steps."""
    run = runs.grad(np.tile([1.0, 2.0, 3.0, 4.0], 100), thresholds=100.0)
    flags, counts, stepped, kept = np.zeros(400), np.zeros(400), np.tile([0, 0, 0, 1.0], 100), []
    total = 0
    for step in range(100):
        spiked = 40 <= step < 51
        for part in range(4):
            place = 4 * step + part
            if spiked and (part == 3 or (part >= 1 and step < 48)):
                flags[place] = 1
                total += 1
                kept.append(place + 1)
                if part == 2 or (part == 3 and step < 48):  # the gradient has grown: the partial one's is taken back
                    total -= 1
                    kept.pop(-2)
            counts[place] = total
    run |= {"grad/spike": runs.series(flags), "grad/spike_count": runs.series(counts)}
    run |= {"grad/stepped": runs.series(stepped), "grad/skipped_count": runs.series(np.zeros(400))}
    assert (flags.sum(), counts[-1]) == (27, 11)
    finding = only(run, "spikes")
    assert finding.values["count"] == 11
    assert "100 gradient norms" in " ".join(measured(tidy(run)))


def test_a_retracted_spike_is_none():
    run = runs.grad(runs.with_spike([50, 90]), [50, 90], skipped=False)
    run["grad/spike_count"][1][50:] -= 1
    finding = only(run, "spikes")
    assert (finding.iterations, finding.values["count"]) == ((90,), 1)


def test_a_counter_that_is_reset_retracts_nothing():
    run = runs.grad(runs.with_spike([50, 150]), [50, 150], skipped=False)
    run["grad/spike_count"][1][99:] -= 1
    finding = only(run, "spikes")
    assert (finding.iterations, finding.values["count"]) == ((50, 150), 2)


# From the first look on


@pytest.mark.parametrize(("factor", "count"), [(40, 0), (60, 1)])
def test_norms_of_the_warm_up_are_set_against_the_runs_own(factor, count):
    norms = np.ones(200)
    norms[6] = factor
    run = runs.grad(norms)
    run["grad/threshold"] = (run["grad/threshold"][0][20:], run["grad/threshold"][1][20:])
    findings = found(run)
    assert [(each.kind, each.iterations) for each in findings] == [("early_norms", (7,))] * count


def activations(**modules):
    return {f"activation/{module}/std": runs.series(np.broadcast_to(std, 40), 5) for module, std in modules.items()}


@pytest.mark.parametrize(("std", "count"), [(90.0, 0), (110.0, 1), (4000.0, 1)])
def test_outputs_far_above_the_others_count_from_the_first_look_on(std, count):
    findings = found(activations(a=0.5, b=1.0, c=1.5, d=std, e=1.0))
    assert [each.kind for each in findings] == ["activation_outlier"] * count
    assert all("d (" in each.text and "from the first measurement on" in each.text for each in findings)


def test_small_activations_make_usual_ones_no_outliers():
    assert found(activations(a=0.01, b=0.01, c=0.01, head=5.0)) == []


def test_a_first_look_that_was_far_off_is_told_where_it_came_back():
    values = np.ones(40)
    values[0] = 500.0
    assert "in the first measurement (" in only(activations(a=1, b=1, c=1, d=values), "activation_outlier").text


# Causes


def gpt(bias="attn.k_proj.bias", blocks=3):
    run = runs.weights()
    run["monitor/vanishing_count"] = runs.series(np.full(40, blocks), 5)
    return run | {f"monitor/topk_grad/blocks.{block}.{bias}": runs.series([1e-9]) for block in range(blocks)}


@pytest.mark.parametrize("bias", ["attn.k_proj.bias", "attention.self.key.bias", "attn.to_k.bias", "attn.wk.bias"])
def test_the_keys_bias_is_explained_by_attention(bias):
    finding = only(gpt(bias), "vanishing_gradients")
    assert finding.severity == "note"
    assert "attention's softmax takes the bias of its keys away again" in finding.text
    assert "BatchNorm" not in finding.text


@pytest.mark.parametrize("bias", ["attn.in_proj_bias", "mlp.key.weight", "monkey.bias", "attn.q_proj.bias"])
def test_other_parameters_are_not(bias):
    finding = only(gpt(bias), "vanishing_gradients")
    assert "softmax" not in finding.text
    assert "BatchNorm" not in finding.text


@pytest.mark.parametrize(("after", "cause"), [("bn1", True), ("batch_norm", True), ("ln1", False), ("relu", False)])
def test_a_batch_norm_is_a_cause_where_one_follows(after, cause):
    run = gpt("conv.bias", blocks=1)
    run |= {f"activation/blocks.0.{module}/std": runs.series(np.ones(40), 5) for module in ("conv", after, "fc")}
    text = only(run, "vanishing_gradients").text
    assert ("blocks.0.conv.bias (the BatchNorm that follows takes it away again)" in text) is cause
    assert ("handler.diagnostics" in text) is not cause


def test_more_than_are_explained_stay_a_warning():
    run = gpt(blocks=2)
    run["monitor/vanishing_count"] = runs.series(np.full(40, 7), 5)
    finding = only(run, "vanishing_gradients")
    assert (finding.severity, "softmax" in finding.text) == ("warning", False)


def test_a_keys_bias_that_does_not_move_is_no_problem_but_others_are():
    run = runs.weights(frozen=1) | {"monitor/topk_frozen/attn.key.bias": runs.series(np.arange(3, 43), 5)}
    finding = only(run, "frozen_parameters")
    assert finding.severity == "note"
    assert "attn.key.bias since iteration 5. It is so by the model's make" in finding.text
    run |= {"monitor/frozen_count": runs.series(np.full(40, 2), 5)}
    run |= {"monitor/topk_frozen/head.weight": runs.series(np.arange(3, 43), 5)}
    finding = only(run, "frozen_parameters")
    assert finding.severity == "problem"
    assert "2 parameters no longer move (monitor/frozen_count): head.weight since iteration 5. It is so" in finding.text


def test_a_bias_that_does_not_move_while_its_weight_does_is_no_problem():
    """Before a BatchNorm that no name tells of."""
    run = runs.weights(frozen=1) | {"monitor/topk_frozen/0.bias": runs.series(np.arange(3, 43), 5)}
    finding = only(run, "frozen_parameters")
    assert finding.severity == "note"
    assert "0.bias since iteration 5. They are biases whose weights move." in finding.text
    assert "BatchNorm" not in finding.text
    run |= {"monitor/frozen_count": runs.series(np.full(40, 2), 5)}
    run |= {"monitor/topk_frozen/0.weight": runs.series(np.arange(3, 43), 5)}
    assert only(run, "frozen_parameters").severity == "problem"


def test_the_first_module_that_is_not_finite_is_named_in_the_order_of_execution():
    """What holds it has its output later, and its name may come earlier in the alphabet."""
    bad, good = runs.series([0, 0, 5, 5.0]), runs.series([0, 0, 0, 0.0])
    modules = {"z.embed": good, "m.lin": bad, "b.lin": bad, "m": bad, "b": bad, "_root_": bad}
    run = {f"activation/{module}/nonfinite_count": series for module, series in modules.items()}
    assert "first in m.lin, and in 4 more modules" in only(run, "nonfinite_activations").text
    backwards = dict(reversed(run.items()))  # recorded in another order, containers are still not the first
    assert "first in b.lin," in only(backwards, "nonfinite_activations").text


# Parameters that are not trained


def test_layers_that_never_changed_are_named():
    run = rcc(**{f"blocks.{block}.{part}": (0.0 if block == 1 else 1.0, 1.0) for block in range(3) for part in "abc"})
    finding = only(run, "untrained")
    assert finding.severity == "note"
    assert "3 layers whose weights did not change" in finding.text
    assert "blocks.1 (3 in it)" in finding.text
    assert found(rcc(a=(1.0, 1.0), b=(1.0, 1.0)), "untrained") == []
    assert found(rcc(a=(0.0, 0.0), b=(0.0, 0.0)), "untrained") == []  # nothing at all moved: not a block's


@pytest.mark.parametrize(("fraction", "told"), [(0.9, True), (0.4, False)])
def test_lost_updates(fraction, told):
    run = runs.weights() | {"monitor/lost_update_fraction": runs.series(np.full(40, fraction), 5)}
    findings = found(run, "lost_updates")
    assert bool(findings) is told
    if told:
        assert findings[0].severity == "warning"
        assert "Rounding to low precision takes 90 % of the updates (monitor/lost_update_fraction)" in findings[0].text


def test_names_of_one_block_stand_together():
    assert together(["h.0.a.w", "h.0.b.w", "h.10.a.w", "x", "y.z"]) == "h.0 (2 in it), h.10.a.w, x and y.z"


def test_nothing_is_healthy_that_is_not_finite():
    run = without(runs.grad(np.full(50, math.nan), range(1, 51)), "threshold")
    assert healthy(find(tidy(run))) is False
