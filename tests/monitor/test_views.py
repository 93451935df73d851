"""Published tensors are used again only where nobody could see them change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import ActivationHandler
from ignite_monitor.monitor import views
from ignite_monitor.monitor.views import NamedViews

NAMES = ["a", "b", "c"]
BEFORE, AFTER = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]


def values(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# What may be left of a view when all else of it is gone, and the number that it should still be.
HOLDERS = {
    "itself": (lambda view: view, float),
    "a container": (lambda view: {"x": [view]}, lambda held: float(held["x"][0])),
    "detached": (lambda view: view.detach(), float),
    "data": (lambda view: view.data, float),
    "another shape": (lambda view: view[None, None], lambda held: float(held[0, 0])),
    "what it is a view of": (lambda view: view._base, lambda held: float(held[1])),
    "an array": (lambda view: view.numpy(), float),
    "an array's memory": (lambda view: memoryview(view.numpy()), lambda held: held[()]),
    "an array by DLPack": (lambda view: np.from_dlpack(view), float),
    "a tensor by DLPack": (lambda view: torch.from_dlpack(view), float),
    "memory": (lambda view: view.untyped_storage(), lambda held: float(torch.tensor([]).double().set_(held)[1])),
    "a future": (lambda view: future(view), lambda held: float(held.value())),
    "a generator": (lambda view: (each for each in [view]), lambda held: float(next(held))),
}


def future(view):
    held = torch.futures.Future()
    held.set_result(view)
    return held


@pytest.mark.parametrize("kind", list(HOLDERS))
def test_whoever_keeps_one_never_sees_it_change(kind):
    hold, number = HOLDERS[kind]
    views = NamedViews()
    held = hold(views.show(NAMES, values(BEFORE))[1]["b"])
    _, after = views.show(NAMES, values(AFTER))
    assert number(held) == 2
    assert [float(each) for each in after.values()] == AFTER


def test_a_graph_made_with_one_can_still_be_gone_back_through():
    views = NamedViews()
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    loss = weight * views.show(NAMES, values(BEFORE))[1]["b"]
    views.show(NAMES, values(AFTER))
    loss.backward()
    assert weight.grad == 2


def test_memory_that_other_processes_may_see_is_not_written_to():
    views = NamedViews()
    shown, of_name = views.show(NAMES, values(BEFORE))
    pointer = of_name["b"].share_memory_().data_ptr()
    del shown, of_name
    shown, _ = views.show(NAMES, values(AFTER))
    assert shown[1].data_ptr() != pointer


@pytest.mark.skipif(not views._counts_all_owners(), reason="torch does not tell whether a graph holds a tensor")
def test_what_nobody_has_kept_is_used_again():
    views = NamedViews()
    first = {name: id(view) for name, view in views.show(NAMES, values(BEFORE))[1].items()}
    for numbers in (AFTER, BEFORE):
        shown, of_name = views.show(NAMES, values(numbers))
        assert shown.tolist() == [float(view) for view in of_name.values()] == numbers
        assert {name: id(view) for name, view in of_name.items()} == first
        del shown, of_name
    assert list(views.show(["a", "b", "d"], values(AFTER))[1]) == ["a", "b", "d"]
    assert views.show(["a", "b", "d"], values(AFTER).float())[0].dtype == torch.float32
    assert views.show(["a"], values([7.0]))[1]["a"] == 7


def test_made_in_inference_mode_and_filled_outside_of_it():
    views = NamedViews()
    with torch.inference_mode():
        views.show(NAMES, values(BEFORE))
    assert views.show(NAMES, values(AFTER))[0].tolist() == AFTER
    with torch.inference_mode():
        views.show(NAMES, values(BEFORE))


def test_where_owners_are_not_known_all_are_new(monkeypatch):
    monkeypatch.setattr(views, "_counts_all_owners", lambda: False)
    shown = NamedViews()
    _, before = shown.show(NAMES, values(BEFORE))
    _, after = shown.show(NAMES, values(AFTER))
    assert [float(each) for each in before.values()] == BEFORE
    assert [float(each) for each in after.values()] == AFTER


def test_metrics_that_a_user_keeps_of_every_iteration():
    """Against the same run in which they are turned into numbers at once."""
    kept: list[dict[str, torch.Tensor]] = []
    numbers: list[dict[str, float]] = []

    def run(keep):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(engine, batch):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()

        trainer = Engine(train_step)
        with ActivationHandler(model, activations=True).attach(trainer):
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: keep(engine.state.metrics))
            trainer.run(torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1)).unbind())

    run(lambda metrics: numbers.append({name: float(value) for name, value in metrics.items()}))
    run(lambda metrics: kept.append(dict(metrics) if len(kept) % 2 else {"one": metrics["activation/0/mean"]}))
    for i, (each, expected) in enumerate(zip(kept, numbers, strict=True)):
        if i % 2:
            assert {name: float(value) for name, value in each.items()} == expected
        else:
            assert float(each["one"]) == expected["activation/0/mean"]
