"""Which gradient a detection speaks of: the state machine by itself, and GradMonitor in the train steps it is for."""

from __future__ import annotations

import copy

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import ActivationHandler, GradMonitor, MeanStdThreshold, StaticThreshold, WeightUpdateHandler
from ignite_monitor.gradient.window import GradientWindow, State
from tests._trainers import Recorder, grad_norm, loss_of, make_batches, make_model, mean_of, norm_of, train, true_norm
from tests.stress._steps import PUT

CLOSE = {"rel": 1e-5}


def sgd(model, lr=1e-6):
    return torch.optim.SGD(model.parameters(), lr=lr)


def observations(monitor):
    return float(monitor.state_dict()["detector"]["rule"]["count"])


# The state machine


def in_state(state, detection="old"):
    """A window in which an iteration has started, and what leads to the state has happened."""
    window = GradientWindow()
    window.iteration_started(unseen=False)
    if state is State.CLOSED:
        return window
    window.backward(detection, shared=state is State.ASIDE)
    if state is State.LEFT:
        window.iteration_started(unseen=False)
    elif state is State.ASIDE:
        window.others_step_started()
    assert window.state is state
    return window


@pytest.mark.parametrize(
    ("state", "seen", "unseen"),
    [
        (State.CLOSED, State.CLOSED, State.CLOSED),
        (State.LEFT, State.LEFT, State.CLOSED),
        (State.OPEN, State.LEFT, State.CLOSED),
        (State.ASIDE, State.CLOSED, State.CLOSED),
    ],
)
def test_an_iteration_starts(state, seen, unseen):
    for is_unseen, expected in ((False, seen), (True, unseen)):
        window = in_state(state)
        window.iteration_started(is_unseen)
        assert window.state is expected
        assert window.last is None


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_opens_the_window_and_its_detection_is_the_newest(state, shared):
    window = in_state(state)
    assert window.backward("new", shared) is not shared
    assert (window.state, window.newest, window.returned()) == (State.OPEN, "new", "new")


@pytest.mark.parametrize("state", State)
def test_a_step_takes_the_newest_detection_or_judges_what_it_is_about_to_use(state):
    window = in_state(state)
    taken = window.step_started(lambda: "judged")
    expected = ("old", True, True) if state in (State.OPEN, State.ASIDE) else ("judged", False, True)
    assert taken == expected
    assert window.step_completed() == expected
    assert (window.state, window.last, window.returned()) == (State.CLOSED, expected, None)


@pytest.mark.parametrize("of_backward", [True, False])
def test_another_step_of_an_iteration_takes_the_detection_of_a_backward_again(of_backward):
    window = in_state(State.OPEN if of_backward else State.CLOSED)
    first = window.step_started(lambda: "judged")
    window.step_completed()
    second = window.step_started(lambda: "judged again")
    assert second == (first._replace(enters=False) if of_backward else ("judged again", False, True))


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_of_another_optimizer_lays_a_shared_backward_aside(state, shared):
    window = in_state(state)
    if state is State.OPEN:
        window.backward("newer", shared)
    laid_aside = state is State.OPEN and shared
    assert window.others_step_started() is laid_aside
    assert window.state is (State.ASIDE if laid_aside else state)
    assert window.returned() == ("newer" if state is State.OPEN and not shared else None)


def test_what_a_closure_evaluates_after_its_first_time_opens_no_window():
    window = in_state(State.OPEN)
    window.step_started(lambda: "judged")
    assert not window.backward("later", shared=False)
    assert window.step_completed().detection == "old"
    assert window.state is State.CLOSED


@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_after_a_step_may_be_published_unless_it_reached_other_models(shared):
    window = in_state(State.OPEN)
    window.step_started(lambda: "judged")
    window.step_completed()
    window.backward("later", shared)
    assert window.returned() == (None if shared else "later")
    assert window.last.detection == "old"


@pytest.mark.parametrize("is_new", [True, False])
def test_the_next_backward_decides_on_a_tentative_entry_and_whether_it_may_be_announced_anew(is_new):
    window = in_state(State.OPEN)
    window.before, window.announced = "what was known", True
    window.iteration_started(unseen=False)
    assert window.decided(is_new) == "what was known"
    assert (window.before, window.announced) == (None, not is_new)


def test_a_tentative_entry_outlives_iterations_that_are_not_seen():
    window = in_state(State.OPEN)
    window.before = "what was known"
    window.iteration_started(unseen=True)
    assert (window.before, window.announced) == ("what was known", False)


# What becomes of a gradient between backward and step


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("how", [*PUT])
@pytest.mark.parametrize("skip_step", [False, True])
def test_a_gradient_replaced_after_its_backward_is_one_detection_one_event_and_one_observation(factor, how, skip_step):
    model, truth, flags, told, moved = make_model(), [], [], [], []
    optimizer = sgd(model)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        flags.append(engine.state.unhealthy_spike)
        for parameter in model.parameters():
            PUT[how](parameter, parameter.grad.detach() * factor)
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        moved.append(any(not torch.equal(each, before[name]) for name, each in model.state_dict().items()))

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike="skip" if skip_step else lambda engine, norm: told.append((engine.state.iteration, norm)),
    )
    recorder = train(step, make_batches(9, spikes=[4, 5]), monitor)
    assert flags == recorder.flags == [i in (4, 5) for i in range(1, 10)]
    assert recorder.of("grad/norm") == recorder.norms == pytest.approx(truth, **CLOSE)
    assert told == [(i, pytest.approx(truth[i - 1], **CLOSE)) for i in (4, 5) if not skip_step]
    assert recorder.of("grad/spike_count") == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert observations(monitor) == 8  # of spikes in a row the first enters alone
    entered = [min(norm, 50.0) for i, norm in enumerate(truth[:-1], 1) if i != 5]
    assert recorder.of("grad/mean")[-1] == pytest.approx(sum(entered) / 7, **CLOSE)
    assert recorder.of("grad/stepped") == [float(not (skip_step and i in (4, 5))) for i in range(1, 10)]
    assert recorder.of("grad/skipped_count")[-1] == 2 * skip_step
    assert moved == [factor > 0 and not (skip_step and i in (4, 5)) for i in range(1, 10)]


@pytest.mark.parametrize("how", [*PUT])
def test_gradients_that_no_backward_makes_are_judged_at_each_step(how):
    model, truth = make_model(), []
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(engine, batch):
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            PUT[how](parameter, gradient)
        truth.append([norm_of([gradient]) for gradient in gradients])
        optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    engine = Engine(step)
    monitor.attach(engine)
    WeightUpdateHandler(model, optimizer, sample_size=None).attach(engine)
    ActivationHandler(model, gradients={"norm": torch.linalg.vector_norm}).attach(engine)
    recorder = Recorder(engine)
    engine.run(make_batches(6, spikes=[4]), max_epochs=1)
    whole = [sum(norm**2 for norm in norms) ** 0.5 for norms in truth]
    assert recorder.of("grad/norm") == pytest.approx(whole, **CLOSE)
    assert recorder.of("grad/spike") == [0, 0, 0, 1, 0, 0]
    assert recorder.of("monitor/grad_max") == pytest.approx([max(norms) for norms in truth], **CLOSE)
    for place, (name, _) in enumerate(model.named_parameters()):
        assert recorder.of(f"gradient/{name}/norm") == pytest.approx([norms[place] for norms in truth], **CLOSE)


def test_gradients_and_parameters_that_are_inference_tensors_stop_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.backbone = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    model, truth = Net(), []
    optimizer = sgd(model, lr=0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        if engine.state.iteration % 2:
            loss_of(model, batch).backward()
        else:  # as evolution strategies do
            with torch.inference_mode():
                for parameter in model.head.parameters():
                    parameter.grad = 0.1 * torch.ones_like(parameter)
        truth.append(grad_norm(model))
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(step)
    GradMonitor(model, optimizer).attach(engine)
    WeightUpdateHandler(model, optimizer, sample_size=None).attach(engine)
    ActivationHandler(model, gradients=True).attach(engine)
    recorder = Recorder(engine)
    engine.run(make_batches(6), max_epochs=1)
    assert recorder.of("grad/norm") == pytest.approx(truth, **CLOSE)
    assert all(recorder.of("monitor/grad_max"))
    assert recorder.of("monitor/update_ratio_max")[1] > 0
    assert recorder.of("gradient/head.bias/mean")[1::2] == pytest.approx([0.1] * 3)


# Spikes that the train step leaves out


def set_to_none(parameter, _):
    parameter.grad = None


@pytest.mark.parametrize("how", [*PUT, "none"])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_a_spike_that_is_left_out_counts_however_gradients_are_set_to_zero(how, zero_at):
    model, told = make_model(), []
    optimizer = sgd(model)

    def zero():
        for parameter in model.parameters():
            if parameter.grad is not None:
                (set_to_none if how == "none" else PUT[how])(parameter, torch.zeros_like(parameter))

    def step(engine, batch):
        if zero_at == "start":
            zero()
        loss_of(model, batch).backward()
        if not engine.state.unhealthy_spike:
            optimizer.step()
        if zero_at == "end":
            zero()

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike=lambda engine, norm: told.append(engine.state.iteration),
    )
    recorder = train(step, make_batches(8, spikes=[3, 4, 6]), monitor)
    assert recorder.of("grad/spike_count") == [0, 0, 1, 2, 2, 3, 3, 3]
    assert recorder.of("grad/stepped") == [1, 1, 0, 0, 1, 0, 1, 1]
    assert told == [3, 4, 6]
    assert observations(monitor) == 7  # of spikes in a row the first enters alone


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("spike", [7, 8, 9, None])
def test_accumulation_over_iterations_is_one_value_observation_and_event_per_step(create_graph, spike):
    model, truth, told = make_model(), [], []
    optimizer = sgd(model)

    def step(engine, batch):
        i = engine.state.iteration
        if i % 3 == 1:
            optimizer.zero_grad()
        loss_of(model, batch).backward(create_graph=create_graph)
        truth.append(norm_of(p.grad for p in model.parameters()))
        assert engine.state.grad_norm == pytest.approx(truth[-1], **CLOSE)
        assert engine.state.unhealthy_spike is (truth[-1] > 50.0)
        if i % 3 == 0:
            optimizer.step()

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike=lambda engine, norm: told.append(engine.state.iteration),
    )
    recorder = train(step, make_batches(18, spikes=[] if spike is None else [spike]), monitor)
    flagged = [] if spike is None else list(range(spike, 10))
    published = [i % 3 == 0 or i in flagged for i in range(1, 19)]
    assert recorder.of("grad/norm") == [
        pytest.approx(norm, **CLOSE) if there else None for norm, there in zip(truth, published, strict=True)
    ]
    assert [i for i, value in enumerate(recorder.of("grad/stepped"), 1) if value] == [3, 6, 9, 12, 15, 18]
    assert recorder.of("grad/spike_count")[-1] == (spike is not None)
    assert told == ([] if spike is None else [spike])
    assert observations(monitor) == 6


@pytest.mark.parametrize("flagged", [False, True])
def test_accumulation_within_an_iteration_is_one_observation_of_the_whole(flagged):
    model, truth, seen, told = make_model(), [], [], []
    optimizer = sgd(model)
    batches = make_batches(12, spikes=[5] if flagged else [])

    def step(engine, micro_batches):
        optimizer.zero_grad()
        for batch in micro_batches:
            loss_of(model, batch).backward()
            seen.append(engine.state.unhealthy_spike)
        truth.append(true_norm(model, micro_batches))
        optimizer.step()

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike=lambda engine, _: told.append(engine.state.iteration),
    )
    recorder = train(step, [batches[i : i + 3] for i in range(0, 12, 3)], monitor)
    assert recorder.of("grad/norm") == pytest.approx(truth, **CLOSE)
    assert seen == [flagged and i in (4, 5) for i in range(12)]
    assert told == [2] * flagged
    assert (recorder.of("grad/spike_count")[-1], observations(monitor)) == (flagged, 4)


@pytest.mark.parametrize("every", [2, 3, 4])
def test_filters_that_meet_some_iterations_of_an_accumulation(every):
    """Steps in the others go unseen: what is published is whole gradients alone, and partial ones that are flagged."""
    model, truth = make_model(), []
    optimizer = sgd(model)

    def step(engine, batch):
        i = engine.state.iteration
        if i % 4 == 1:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        if i % 4 == 0:
            optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    recorder = train(step, make_batches(24, spikes=[5]), monitor, event=Events.ITERATION_STARTED(every=every))
    expected, whole = [], 0
    for i, norm in enumerate(truth, 1):
        is_published = i % every == 0 and (i % 4 == 0 or norm > 50.0)
        expected.append(pytest.approx(norm, **CLOSE) if is_published else None)
        whole += i % every == 0 and i % 4 == 0
    assert recorder.of("grad/norm") == expected
    # Of iterations 5 to 8, whose sum is a spike, one entry: that of the step where it is seen, else the flagged part.
    assert recorder.metrics[23]["grad/spike_count"] == 1
    assert observations(monitor) == whole + (every == 3)


# Several optimizers and models


def test_two_optimizers_on_one_model_each_clipped_have_the_norms_that_backward_left():
    model, truth = make_model(), []
    optimizers = [sgd(model[i]) for i in (0, 2)]

    def step(engine, batch):
        model.zero_grad()
        loss_of(model, batch).backward()
        truth.append([grad_norm(model[i]) for i in (0, 2)])
        for optimizer, part in zip(optimizers, (model[0], model[2]), strict=True):
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()

    monitors = [GradMonitor(model, o, prefix=f"m{i}", flag=f"bad_{i}") for i, o in enumerate(optimizers)]
    monitors.append(GradMonitor(model, prefix="both", flag="bad_both"))
    recorder = train(step, make_batches(6), *monitors)
    for i in range(2):
        assert recorder.of(f"m{i}/norm") == pytest.approx([norms[i] for norms in truth], **CLOSE)
    assert recorder.of("both/norm") == pytest.approx([(a * a + b * b) ** 0.5 for a, b in truth], **CLOSE)
    assert [observations(monitor) for monitor in monitors] == [6, 6, 6]


def test_two_models_trained_together_each_clipped_have_the_norms_that_backward_left():
    encoder, decoder, truth = make_model(0), nn.Linear(2, 2), []
    optimizers = [sgd(encoder), sgd(decoder)]

    def step(engine, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(decoder(encoder(batch[0])), batch[1]).backward()
        truth.append([grad_norm(encoder), grad_norm(decoder)])
        for optimizer, model in zip(optimizers, (encoder, decoder), strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    monitors = [
        GradMonitor(model, optimizer, prefix=f"m{i}", flag=f"bad_{i}")
        for i, (model, optimizer) in enumerate(zip((encoder, decoder), optimizers, strict=True))
    ]
    recorder = train(step, make_batches(5), *monitors)
    for i in range(2):
        assert recorder.of(f"m{i}/norm") == pytest.approx([norms[i] for norms in truth], **CLOSE)


@pytest.mark.parametrize("order", ["dg", "gd", "alternating"])
@pytest.mark.parametrize("large", [False, True])
def test_a_gan_counts_what_its_own_steps_use_whatever_the_generator_leaves(order, large):
    generator, discriminator = make_model(0), nn.Linear(2, 1)
    models = {"g": generator, "d": discriminator}
    optimizers = {name: sgd(model) for name, model in models.items()}
    truth = {"g": [], "d": []}

    def step(engine, batch):
        turns = order if order != "alternating" else "dg"[engine.state.iteration % 2]
        for name in "dg":
            truth[name].append(None)
        for name in turns:
            optimizers[name].zero_grad()
            fake = generator(batch[0])
            loss = discriminator(fake.detach() if name == "d" else (1e4 if large else 1) * fake).square().mean()
            loss.backward()
            truth[name][-1] = grad_norm(models[name])
            nn.utils.clip_grad_norm_(models[name].parameters(), 0.01)
            optimizers[name].step()

    monitors = [
        GradMonitor(model, optimizers[name], threshold=StaticThreshold(1e9), prefix=name, flag=f"bad_{name}")
        for name, model in models.items()
    ]
    recorder = train(step, make_batches(6), *monitors)
    for monitor, (name, norms) in zip(monitors, truth.items(), strict=True):
        expected = [None if norm is None else pytest.approx(norm, **CLOSE) for norm in norms]
        assert recorder.of(f"{name}/norm") == expected
        assert observations(monitor) == sum(norm is not None for norm in norms)


def test_sharpness_aware_minimization_counts_the_gradient_of_its_second_backward():
    model, truth = make_model(), []
    optimizer = sgd(model)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        moves = [0.05 * parameter.grad / grad_norm(model) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(warmup=2, k=1e6))
    recorder = train(step, make_batches(6), monitor)
    assert recorder.of("grad/norm") == pytest.approx(truth, **CLOSE)
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(truth[:-1]), **CLOSE)
    assert observations(monitor) == 6


def test_steps_before_backward_use_the_gradient_of_the_iteration_before():
    model, truth = make_model(), []
    optimizer = sgd(model)

    def step(engine, batch):
        truth.append(grad_norm(model))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batch).backward()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    recorder = train(step, make_batches(6, spikes=[3]), monitor)
    # The spike is published where it is seen, with no step after it; the next step uses it, in place of that entry.
    assert recorder.of("grad/norm")[3:] == pytest.approx(truth[3:], **CLOSE)
    assert recorder.of("grad/norm")[:2] == [None, pytest.approx(truth[1], **CLOSE)]
    assert recorder.of("grad/norm")[2] == pytest.approx(truth[3], **CLOSE)
    assert recorder.of("grad/spike_count") == [None, 0, 1, 1, 1, 1]
    assert observations(monitor) == 5


def test_autograd_grad_decides_nothing_about_a_spike_that_was_left_out():
    model = make_model()
    optimizer = sgd(model)

    def step(engine, batch):
        torch.autograd.grad(loss_of(model, batch), list(model.parameters()))  # it finds the spike still there
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if not engine.state.unhealthy_spike:
            optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    recorder = train(step, make_batches(6, spikes=[3]), monitor)
    assert recorder.of("grad/spike_count") == [0, 0, 1, 1, 1, 1]


def test_no_hook_waits_for_a_backward_after_the_train_step():
    model = make_model()
    optimizer = sgd(model)
    engine = Engine(lambda engine, batch: loss_of(model, batch).backward())
    GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3)).attach(engine)
    hooks = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: hooks.append([len(p._backward_hooks or ()) for p in model.parameters()])
    )
    engine.run(make_batches(4), max_epochs=1)
    assert hooks == [[0] * 4] * 4
