"""Samples of parameters: which elements, and their norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ignite_monitor.model.samples import ParameterSamples
from ignite_monitor.model.sampling import fnv1a_64, spread_indices


def test_sampled_elements_are_those_of_the_name():
    model = nn.Sequential(nn.Linear(30, 40), nn.Embedding(50, 4))
    samples = ParameterSamples(model, 16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    samples.keep_weights([parameter.detach() for parameter in model.parameters()])
    changed = [parameter + torch.rand_like(parameter) for parameter in before]
    weights, changes = samples.weights_and_changes(changed)
    sizes = {"0.weight": 40, "0.bias": 16, "1.weight": 50}  # of tables one in each row
    for place, (name, size) in enumerate(sizes.items()):
        index = spread_indices(fnv1a_64(name), before[place].numel(), size)
        numel = before[place].numel()
        widths = [(i + 1) * numel // size - i * numel // size for i in range(size)]
        weigh = (torch.tensor(widths, dtype=torch.float64) * size / numel).sqrt()
        kept = before[place].flatten()[index].double() * weigh
        assert float(weights[place]) == pytest.approx(float(kept.norm()), rel=1e-6)
        moved = (changed[place] - before[place]).flatten()[index].double() * weigh
        assert float(changes[place]) == pytest.approx(float(moved.norm()), rel=1e-6)
    rows = spread_indices(fnv1a_64("1.weight"), 200, 50) // 4
    assert rows.tolist() == list(range(50))


def norms_of(samples, gradients):
    norms, positions, start = [], {}, 0
    for places, piece in samples.gradient_norms(gradients):
        norms.append(piece)
        positions |= {place: start + at for place, at in places.items()}
        start += len(piece)
    return samples.ordered(norms, positions)


def test_gradient_norms_are_scaled_to_the_whole_parameter():
    model = nn.Linear(30, 40)
    samples = ParameterSamples(model, 16)
    gradients = dict(enumerate(torch.full_like(each.detach(), 2.0) for each in (model.weight, model.bias)))
    expected = [float(gradient.norm()) for gradient in gradients.values()]
    assert norms_of(samples, gradients).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("change", ["none", "new parameter", "new module", "dtype", "replaced", "removed"])
def test_fit(change):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    samples = ParameterSamples(model, None)
    if change == "new parameter":
        model[0].extra = nn.Parameter(torch.ones(1))
    elif change == "new module":
        model[1].append = nn.Linear(1, 1)
    elif change == "dtype":
        model.double()
    elif change == "replaced":
        model[0].weight = nn.Parameter(torch.ones(4, 3))
    elif change == "removed":
        model[1].bias = None
    assert samples.fit() == (change == "none")


def test_elements_are_weighed_by_what_each_stands_for_in_a_group_of_several_sizes():
    """Of ones the norm is exact only if the weights' squares add up to the number of elements."""
    model = nn.ParameterList([torch.ones(*shape) for shape in ((24,), (16,), (30, 3, 1), (31,), (4, 4))])
    samples = ParameterSamples(model, 16)
    gradients = {place: each.detach().clone() for place, each in enumerate(model)}
    expected = [float(each.numel()) ** 0.5 for each in model]
    assert norms_of(samples, gradients).tolist() == pytest.approx(expected, rel=1e-6)
    some = {place: gradients[place] for place in (1, 3)}
    got = norms_of(samples, some).tolist()
    assert [got[1], got[3]] == pytest.approx([expected[1], expected[3]], rel=1e-6)
    assert got[0] != got[0]
    weights, changes = samples.weights_and_changes([each.detach() for each in model])
    assert weights.tolist() == [0.0] * 5
    assert changes.tolist() == pytest.approx([4.0] * 5)  # the mean of 16 ones' weights is 1
