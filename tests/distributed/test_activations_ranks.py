"""Two ranks publish what one process with the whole batches sees, uneven shares and conditional modules included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed._activations_worker import COUNT, SCENARIOS, dense, net, train
from tests.distributed._launch import launched

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

LATE = ("activation/experts.1/",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_activations_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


def of_forward(published):
    # Of a module that only one rank calls the loss of the whole is another one.
    start = ("activation/", "recorded/", "parameter/")
    return {name: value for name, value in published.items() if name.startswith(start) and not name.startswith(LATE)}


@pytest.mark.parametrize(("name", "model"), [("ddp", net), ("fsdp", dense)])
def test_both_ranks_publish_what_one_process_does(results, name, model):
    whole = train(model(), None)["published"]
    for result in results(name):
        for i in range(COUNT):
            found, wanted = of_forward(result["published"][i]), of_forward(whole[i])
            rows = found.pop("recorded/_root_/rows", None)
            wanted.pop("recorded/_root_/rows", None)
            assert rows in (None, 4.0)
            if i >= 3:  # the first rank's output is without the second expert's
                found, wanted = ({k: v for k, v in each.items() if "_root_" not in k} for each in (found, wanted))
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), i


def test_a_module_that_one_rank_calls_is_published_from_the_next_iteration_on(results):
    for result in results("ddp"):
        there = ["activation/experts.1/mean" in each for each in result["published"]]
        assert there == [False, False, False, False, True, True]
        # Its five rows are the second rank's.
        assert result["published"][4]["activation/experts.1/count"] == 5
        assert result["published"][4]["activation/experts.1/half/count"] == 2.5


@pytest.mark.parametrize("name", ["ddp histograms", "fsdp histograms"])
def test_histograms_are_of_own_batches_and_of_whole_parameters(results, name):
    for rank in results(name):
        for key, own in rank["tensors"].items():
            values, found = own.double().numpy().ravel(), rank["drawn"][f"histograms/{key}"]
            assert found["num"] == len(values)
            assert (found["min"], found["max"]) == (values.min(), values.max())
            counts, _ = np.histogram(values, found["bucket_limits"])
            assert found["bucket_counts"][1:] == counts.tolist()


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "histograms" not in name])
def test_both_ranks_agree_to_the_last_bit(results, name):
    first, second = results(name)
    assert first == second


def test_sharded_gradients_are_whole(results):
    (published, *_), _ = (result["published"] for result in results("fsdp"))
    gradients = [parameter.grad for parameter in shares_mean().parameters()]
    found = [value for name, value in published.items() if name.startswith("gradient/")]
    assert found == pytest.approx([gradient.norm().item() for gradient in gradients], rel=1e-4)


def shares_mean():
    from tests.distributed._activations_worker import SPLIT, batches

    model, batch = dense().double(), batches()[0].double()
    for share in (batch[:SPLIT], batch[SPLIT:]):
        (model(share).square().mean() / 2).backward()
    return model


@pytest.mark.parametrize("name", ["ddp clipped", "fsdp clipped"])
def test_gradients_of_micro_batches_before_and_after_clipping(results, name):
    for result in results(name):
        assert result["published"] == pytest.approx(result["truth"], rel=1e-5)
