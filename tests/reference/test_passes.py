"""Forward passes of a model beside those of a reference."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn

from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.names import named_modules
from ignite_monitor.reference.passes import ReferencePasses
from ignite_monitor.reference.reference import Reference
from tests._helpers import assert_same
from tests._models import Checkpointed, Lambda, make_mlp
from tests.reference._recorder import Recorder, Reporter, watch


class Net(nn.Module):
    """Calls a module twice, with keyword arguments, returns tuples, changes what it has made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.skip = nn.Linear(4, 4)

    def forward(self, x):
        x = self.relu(x)
        x = self.relu(self.norm(self.first(input=self.first(x))))
        if random.random() < 0.5:
            x = x + self.skip(x)
        x = x * 2
        x += 1
        return self.last(self.drop(x)), x


def test_pairs_calls_and_changes_nothing():
    torch.manual_seed(0)
    model = Net()
    counterpart = copy.deepcopy(model)
    passes, recorder, warnings = watch(model)
    inputs = [torch.randn(8, 4) for _ in range(6)]
    outputs = {}
    for which, item in (("watched", model), ("alone", counterpart)):
        torch.manual_seed(1)
        random.seed(1)
        outputs[which] = []
        with passes.watched() if which == "watched" else torch.enable_grad():
            for x in inputs:
                output = item(x.clone())[0]
                output.sum().backward()
                outputs[which].append(output.detach())
    assert warnings == []
    assert_same([*outputs["watched"]], [*outputs["alone"]])
    for actual, references in zip(model.parameters(), counterpart.parameters(), strict=True):
        assert_same(actual.grad, references.grad)
    assert_same([*model.buffers()], [*counterpart.buffers()])
    assert {name: len(pairs) for name, pairs in recorder.pairs.items() if name in ("", "first")} == {"": 6, "first": 12}
    assert 0 < len(recorder.pairs["skip"]) < 6
    assert {item for result in recorder.differences().values() for item in result} == {0.0}


def test_what_is_changed_in_place_later_on_is_kept_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True))
    passes, recorder, _ = watch(model)
    x = torch.randn(8, 4)
    expected = model[0](x).detach()
    with torch.no_grad():
        model[0].weight.mul_(2)
    for _ in range(2):
        with passes.watched():
            model(x)
        ((_, kept),) = recorder.pairs["1"]
        assert_same(kept, expected)


def test_passes_that_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    passes, recorder, warnings = watch(model)
    x = torch.randn(2, 4)
    model(x)
    with passes.watched():
        model.eval()
        model(x)
        model.train()
        model[0](x)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        torch.func.vmap(model)(x)
    assert recorder.entered == []
    assert len(warnings) == 1  # the reference could not be run either
    with passes.watched():
        model(x)
    assert len(recorder.pairs[""]) == 1


def test_of_a_pass_that_raises_nothing_is_compared():
    def fail(self, x):
        if not in_second_pass() and x.isnan().any():
            raise ZeroDivisionError
        return x

    model = nn.Sequential(nn.Linear(4, 4), Lambda(fail), nn.Linear(4, 4))
    passes, recorder, warnings = watch(model)
    with passes.watched():
        with pytest.raises(ZeroDivisionError):
            model(torch.full((2, 4), torch.nan))
        model(torch.ones(2, 4))
    assert recorder.complete == {}
    with passes.watched():
        model(torch.ones(2, 4))
    assert {name: len(pairs) for name, pairs in recorder.complete.items()} == {"": 1, "0": 1, "1": 1, "2": 1}
    assert warnings == ["a forward pass of the model raised an error or returned None, so nothing is compared"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_not_compared(use_reentrant):
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), use_reentrant=use_reentrant)
    passes, recorder, warnings = watch(model)
    with passes.watched():
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(recorder.entered) == 4
    assert len(recorder.pairs[""]) == 1
    assert warnings == []


def test_root_called_within_itself():
    def forward(self, x, depth=1):
        x = self.linear(x)
        return self(x, depth - 1) if depth else x

    model = Lambda(forward, linear=nn.Linear(2, 2))
    passes, recorder, warnings = watch(model)
    with passes.watched():
        model(torch.ones(2, 2))
        model(torch.ones(2, 2))
    assert recorder.differences() == {"": [0.0] * 4, "linear": [0.0] * 4}
    assert warnings == []


def test_calls_that_do_not_pair_are_skipped():
    def forward(self, x):
        return self.expert(x) if self.gate(x).mean() > 0 else self.other(x)

    model = Lambda(forward, gate=nn.Linear(2, 1), expert=nn.Linear(2, 2), other=nn.Linear(2, 2))
    passes, recorder, warnings = watch(model)
    with torch.no_grad():
        model.gate.bias.copy_(-model.gate(torch.ones(2, 2))[0] * 2)
    with passes.watched():
        for _ in range(3):
            model(torch.ones(2, 2))
    assert {name: len(pairs) for name, pairs in recorder.complete.items()} == {"": 3, "gate": 3}
    assert sorted(warnings) == [
        f"{name} is not compared: it is called other than in the reference" for name in ("expert", "other")
    ]


def test_a_reference_that_fails_is_reported_once():
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)).to("meta")
    passes, recorder, warnings = watch(model, other)
    state = torch.get_rng_state()
    with passes.watched():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert recorder.pairs == {}
    assert len(warnings) == 1
    assert "the reference can't be run on the model's inputs" in warnings[0]
    assert_same(torch.get_rng_state(), state)


def test_a_model_that_makes_a_backward_pass_in_its_forward():
    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    model = Lambda(forward, energy=make_mlp(sizes=(3, 8, 1)))
    passes, recorder, warnings = watch(model)
    with passes.watched():
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
    names = ("", "energy", "energy.0", "energy.1", "energy.2")
    assert recorder.differences() == {name: [0.0, 0.0] for name in names}
    assert warnings == []


def test_errors_of_the_comparison_skip_the_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    passes, recorder, warnings = watch(model)
    original = recorder.compare
    recorder.compare = lambda call, kept: original(call, kept) if call.name != "1" else 1 / 0
    with passes.watched():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert {name: len(pairs) for name, pairs in recorder.complete.items()} == {"": 2, "0": 2}
    assert warnings == ["1 is not compared: ZeroDivisionError: division by zero"]


def test_shared_modules_of_model_and_reference():
    body = nn.Linear(2, 2)
    model, reference = (nn.Sequential(body, nn.Linear(2, 2)) for _ in range(2))
    passes, recorder, warnings = watch(model, reference)
    with passes.watched():
        model(torch.ones(2, 2))
    assert recorder.differences() == {"": [0.0], "0": [0.0], "1": [0.0]}
    assert warnings == []


def test_what_is_kept_is_freed_as_the_model_reaches_it():
    class Counting(Recorder):
        alive = []
        kept = []

        def compare(self, call, kept):
            self.kept.append(weakref.ref(kept))
            self.alive.append(sum(item() is not None for item in self.kept))

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    recorder = Counting()
    names = [name for name in dict(named_modules(model)) if name]
    passes = ReferencePasses(Reference(model, "init"), names, recorder, Reporter().report)
    gc.disable()
    try:
        with passes.watched():
            model(torch.ones(2, 4))
    finally:
        gc.enable()
    assert recorder.alive == [1] * 5
    assert [item() for item in recorder.kept] == [None] * 5
