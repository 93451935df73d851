"""Two ranks see what one process with the whole batch sees, and agree."""

from __future__ import annotations

import math
import signal

import pytest
import torch
import torch.nn.functional as F

from tests._helpers import assert_same, grad_norm
from tests._judge import Judge, mean_of
from tests.distributed._launch import WORLD, launch, launched
from tests.distributed._worker import (
    ACCUMULATING,
    COUNT,
    LEAVING_OUT,
    SCENARIOS,
    SPIKE,
    OneTensor,
    batches,
    curvature,
    net,
    noise_scale,
    train,
)

K, DECAY = 6.0, 0.99  # of the default rule

WORKER = "_worker"
ALONE = ("after the process group", "dropped")  # have processes of their own
RUN = NAMES = [name for name in SCENARIOS if name not in ALONE]
WHOLE = [*(name for name in NAMES[: NAMES.index("ddp no_sync")])]


@pytest.fixture(scope="module")
def whole():
    """One process with the whole batch."""
    return train(net(), None, spike=SPIKE)


def independent_norms(spike: int | None = None, micro: int = 1, every: int = 1) -> list[float]:
    """The gradient norms of a plain loop after each backward: of micro-batches, several iterations to a step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1)
    norms = []
    for place, (x, y) in enumerate(batches(spike)):
        if place % every == 0:
            optimizer.zero_grad()
        for part in range(micro):
            F.mse_loss(model(x[part::micro]), y[part::micro]).backward()
            norms.append(grad_norm(model.parameters()))
        if (place + 1) % every == 0:
            optimizer.step()
    return norms


def approx(value):
    return pytest.approx(value, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("name", WHOLE)
def test_every_rank_publishes_what_one_process_would(results, whole, name):
    norms = independent_norms(SPIKE)
    for result in results(name):
        judge = Judge()
        assert result["fired"] == list(range(1, COUNT + 1))
        assert result["norms"] == approx(norms)
        assert [seen["grad/norm"] for seen in result["seen"]] == approx(norms)
        for place, (seen, expected) in enumerate(zip(result["seen"], whole["seen"], strict=True)):
            assert seen.keys() == expected.keys()
            assert seen == {
                key: pytest.approx(value, rel=1e-3 if "std" in key else 2e-5) for key, value in expected.items()
            }
            statistics = judge.expect(norms[place])
            if 2 <= place < SPIKE:
                assert seen["grad/mean"] == approx(statistics["mean"])
                assert seen["grad/std"] == pytest.approx(statistics["std"], rel=1e-3)
            if 20 <= place < SPIKE:
                assert seen["grad/threshold"] == approx(statistics["threshold"])


@pytest.mark.parametrize("name", [*WHOLE, "sum", "mean"])
def test_spike_in_one_ranks_batch_is_the_same_flag_on_both(results, name):
    first, second = results(name)
    assert [seen["flag"] for seen in first["seen"]] == [place == SPIKE for place in range(1, COUNT + 1)]
    assert first["seen"] == second["seen"]  # to the last bit: a threshold must not fall between two ranks


def test_no_sync_fires_once_with_the_accumulated_gradient(results):
    norms = independent_norms()
    for result in results("ddp no_sync"):
        assert result["fired"] == list(range(1, COUNT + 1))
        assert result["norms"][::2] == [None] * COUNT
        # Two micro-batches, each a mean over half: their sum is twice the gradient of the whole.
        assert result["seen"][0]["grad/norm"] == approx(2 * norms[0])
        assert result["seen"][-1]["grad/spike_count"] <= 1


@pytest.mark.parametrize(
    ("name", "synchronised"),
    [
        ("ddp no_sync", False),
        ("fsdp without gradient sync", False),
        ("ddp accumulation without no_sync", True),
        ("ddp static_graph accumulation without no_sync", True),
        ("fsdp accumulation", True),
    ],
)
def test_accumulation_within_an_iteration(results, name, synchronised):
    norms = independent_norms(micro=2)
    halves = norms[::2], norms[1::2]
    for result in results(name):
        assert [seen["grad/norm"] for seen in result["seen"]] == approx(halves[1])
        assert result["norms"][1::2] == approx(halves[1])
        assert result["norms"][::2] == (approx(halves[0]) if synchronised else [None] * COUNT)
        assert len(result["fired"]) == COUNT * (2 if synchronised else 1)
        # One observation per optimizer step.
        assert result["seen"][-1]["grad/mean"] == approx(mean_of(halves[1][:-1], DECAY))


def test_iterations_under_no_sync_publish_nothing(results):
    norms = independent_norms(every=2)[1::2]
    for result in results("ddp no_sync over iterations"):
        assert result["seen"][::2] == [{"flag": 0.0}] * (COUNT // 2)
        assert [seen["grad/norm"] for seen in result["seen"][1::2]] == approx(norms)
        assert result["seen"][-1]["grad/mean"] == approx(mean_of(norms[:-1], DECAY))


@pytest.mark.parametrize("name", ["clip ddp", "clip fsdp"])
def test_a_clipped_step_is_that_of_one_process_with_its_gradient_scaled_to_the_threshold(results, name):
    first, second = results(name)
    assert first["seen"] == second["seen"]
    assert first["seen"][-1]["grad/clipped_count"] == 1.0
    threshold = first["seen"][SPIKE - 1]["grad/threshold"]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1)
    for place, (x, y) in enumerate(batches(SPIKE), 1):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if place == SPIKE:
            norm = grad_norm(model.parameters())
            assert norm > 2 * threshold
            for parameter in model.parameters():
                parameter.grad *= threshold / norm
        optimizer.step()
    for result in (first, second):
        for actual, references in zip(result["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(actual, references.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["loss ddp", "loss fsdp"])
def test_ranks_agree_on_a_loss_that_is_a_spike_on_one_of_them(results, name):
    first, second = results(name)
    assert first["seen"] == second["seen"]
    assert [seen["grad/loss_spike"] for seen in first["seen"]] == [i == SPIKE for i in range(1, COUNT + 1)]
    assert [seen["flag"] for seen in first["seen"]] == [i == SPIKE for i in range(1, COUNT + 1)]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("skip")])
def test_skipped_step_leaves_the_parameters_as_leaving_the_batch_out_does(results, name):
    first, second = results(name)
    assert first["seen"][SPIKE - 1]["flag"]
    assert first["seen"][-1]["grad/skipped_count"] == 1.0
    for result in (first, second):
        assert_same(result["parameters"], result["left out"])
        assert_same(result["parameters"], first["parameters"])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("leaving out")])
def test_a_spike_that_the_train_step_leaves_out_counts_once_though_gradients_are_zeroed_in_place(results, name):
    whole = train(net(), None, **LEAVING_OUT)["seen"]
    assert whole[-1]["grad/spike_count"] == 1
    for result in results(name):
        for seen, expected in zip(result["seen"], whole, strict=True):
            assert seen == {key: pytest.approx(value, rel=1e-3) for key, value in expected.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("accumulating")])
def test_a_spike_counts_once_while_iterations_accumulate(results, name):
    whole = train(net(), None, **ACCUMULATING)["seen"]
    # One value per step, and of the parts that are flagged.
    published = [0 if i % 4 == 0 else None for i in range(1, 17)] + [1, 1, 1, 1, None, None, None, 1, None, None]
    assert [seen.get("grad/spike_count") for seen in whole] == published
    for result in results(name):
        for seen, expected in zip(result["seen"], whole, strict=True):
            assert seen == {key: pytest.approx(value, rel=1e-3) for key, value in expected.items()}


@pytest.mark.parametrize(("name", "micro"), [("noise scale of two", 1), ("noise scale of four", 2)])
def test_noise_scale_of_ranks_is_that_of_micro_batches(results, name, micro):
    expected = noise_scale(net(), None, micro)
    assert (expected["moments"] != 0).all()
    for result in results(name):
        # Parts of two ranks have the scale of their own loss, those of one process half of it.
        factor = torch.tensor([1, 4, 4, 16, 16, 16, 1])
        assert result["moments"].tolist() == approx((expected["moments"] * factor).tolist())


@pytest.mark.parametrize("name", ["curvature", "curvature, unused parameters"])
def test_curvature_is_that_of_the_ranks_batches_together(results, name):
    alone = curvature(net(unused="unused" in name), None)["seen"]
    assert [len(seen) for seen in alone] == [0, 7]
    for result in results(name):
        for seen, expected in zip(result["seen"], alone, strict=True):
            errors = {key for key in expected if key.endswith("_error")}
            assert seen.keys() == expected.keys()
            assert [seen[key] for key in seen.keys() - errors] == approx([expected[k] for k in seen.keys() - errors])


@pytest.mark.parametrize("name", ["loss fails", "product fails", "unreached loss"])
def test_a_rank_whose_curvature_fails_stops_no_rank(results, name):
    alone = curvature(net(), None)
    for result in results(f"curvature, {name}"):
        for seen, expected in zip(result["seen"], alone["seen"], strict=True):
            # What was known before is right all the same.
            assert seen.keys() <= {"curvature/stability_threshold", "curvature/along_gradient"}
            assert seen == approx({key: expected[key] for key in seen})
        for actual, references in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(actual, references)


@pytest.mark.parametrize("name", ["sum", "sum inf", "mean"])
def test_ranks_with_gradients_of_their_own(results, name):
    both = results(name)
    for place in range(COUNT):
        gradients = torch.stack([result["own"][place] for result in both])
        if name == "sum":
            expected = float(gradients.square().sum().sqrt())
        elif name == "mean":
            expected = float((gradients.square().sum() / WORLD).sqrt())
        else:
            expected = float(gradients.abs().max())
        for result in both:
            assert result["seen"][place]["grad/norm"] == approx(expected)
            assert math.isfinite(result["seen"][place]["grad/norm"])


def test_what_cannot_work_with_a_wrapper_is_refused_by_name(results):
    assert results("refused") == [{}, {}]


def test_dropped_run_frees_its_reducer_by_reference_counting(results):
    for result in results("freed"):
        assert result["watched"] == result["bare"] == [False] * 3


def test_processes_end_cleanly(tmp_path):
    """A reducer that outlives its process group aborts the process at its exit, one time in four."""
    ends = launch("_worker", tmp_path, ["dropped"])
    if any(code == -signal.SIGABRT for code, _ in ends):  # without monitors too, one time in a hundred
        ends = launch("_worker", tmp_path / "again", ["dropped"])
    assert [code for code, _ in ends] == [0, 0], ends
    assert not any("Traceback" in error for _, error in ends), ends


def test_a_training_after_the_process_group_has_ended(tmp_path):
    launched("_worker", tmp_path, ["after the process group"])("after the process group")


@pytest.mark.parametrize("name", ["tensors ddp", "tensors fsdp", "tensors clip fsdp", "tensors skip ddp"])
def test_tensors_are_compared_the_same_on_all_ranks(results, name):
    reaction = {"on_spike": "clip"} if "clip" in name else {"on_spike": "skip"} if "skip" in name else {}
    alone = train(OneTensor(), None, per_parameter=True, **reaction)
    ranks = results(name)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    for result in ranks:
        assert result["collectives"] == result["without"]
        assert [seen["flag"] for seen in result["seen"]] == [place == SPIKE for place in range(1, COUNT + 1)]
        culprits = {k: v for k, v in result["seen"][SPIKE - 1].items() if "culprit" in k}
        assert culprits == {"grad/culprit/net.first.bias": pytest.approx(1.0, abs=0.05)}
        for seen, expected in zip(result["seen"], alone["seen"], strict=True):
            assert seen == pytest.approx(expected, rel=1e-3)
        for one, other in zip(result["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_ranks_with_tensors_of_their_own_agree_on_what_is_a_spike(results, how):
    first, second = results(f"tensors {how}")
    plain = results(how)[0]
    for actual, references, without in zip(first["seen"], second["seen"], plain["seen"], strict=True):
        own, other = ({k: v for k, v in seen.items() if "culprit" not in k} for seen in (actual, references))
        assert own == other
        assert own["grad/norm"] == pytest.approx(without["grad/norm"], rel=1e-6)  # the sum of floats in another order
    assert [seen["flag"] for seen in first["seen"]] == [place == SPIKE for place in range(1, COUNT + 1)]
