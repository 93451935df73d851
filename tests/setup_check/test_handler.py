"""SetupCheck: every finding by a fault that makes it, and none on healthy train steps."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ignite_monitor import MonitorEvents, SetupCheck, attach_monitors
from ignite_monitor.setup_check.evidence import Evidence
from tests._helpers import assert_same, footprint, hooks_only, make_batches, make_step, make_trainer, mse_loss
from tests._models import make_model


def sgd(model, lr=0.05, momentum=0.0):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), 0.1, 3)


def clipping(model):
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: scale_gradients(optimizer, 0))
    return optimizer


def multiplying(model):
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: [item.grad.mul_(0) for item in model.parameters()].clear())
    return optimizer


def zeroing(model):
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    return optimizer


def repeated(count=4):
    return [copy.deepcopy(make_batches(1)[0]) for _ in range(count)]


def setup(
    model=None, make_optimizer=sgd, batches=None, *, call=None, output=Tensor.item, after=lambda *_: None, **options
):
    """Model, optimizer, train step and batches.

    Args:
        call: what is called in place of the model.
        output: the train step's output, made of the loss.
        after: called at the end of the train step with the optimizer and the iteration.
    """
    model = make_model() if model is None else model
    optimizer = make_optimizer(model)
    step = make_step(call or model, optimizer, **options)

    def train_step(engine, batch):
        loss = step(engine, batch)
        after(optimizer, engine.state.iteration)
        return output(loss)

    return model, optimizer, train_step, batches or make_batches(30)


def checked(model, optimizer, train_step, batches=None, *, epochs=1, **arguments):
    """The kinds of all findings of a run but notes, and the check."""
    check = SetupCheck(model, optimizer, **arguments)
    trainer = Engine(train_step)
    check.attach(trainer)
    trainer.run(batches or make_batches(30), max_epochs=epochs)
    return [finding.kind for finding in check.findings or [] if finding.severity != "note"], check


class Parts(nn.Module):
    """An MLP, and parts that take no part in the loss: a layer that is not called, a detached head, a mask token."""

    def __init__(self, unused=0, detached=0, token=0):
        super().__init__()
        self.used = make_model()
        self.unused = nn.Linear(unused, unused) if unused else None
        self.head = nn.Linear(3, detached) if detached else None
        self.token = nn.Parameter(torch.ones(token)) if token else None

    def forward(self, x):
        out = self.used(x)
        if self.head is not None:
            self.head(out.detach())
        return out


def replaced():
    """The optimizer holds parameters from before a wrapper made new ones."""
    model, optimizer, *rest = setup()
    for module in model:
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return model, optimizer, *rest


def new_head():
    model, optimizer, *rest = setup()
    model[-1] = nn.Linear(8, 3)
    return model, optimizer, *rest


def rate_in_a_tensor(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0), capturable=False, foreach=False)


def late(start=40):
    """The first iterations fill a buffer; then gradients are not zeroed."""
    model, optimizer, inner, _ = setup(zero_at="never")
    waiting = Tensor.item, torch.zeros(())
    step = lambda engine, batch: inner(engine, batch) if engine.state.iteration > start else waiting[1].item()  # noqa: E731
    return model, optimizer, step, make_batches(start + 8)


def three_steps(**options):
    """As in reinforcement learning: several updates by one batch of experience."""
    model, optimizer, inner, _ = setup(**options)
    return model, optimizer, lambda *args: [inner(*args) for _ in range(3)][-1], make_batches(30)


def accumulating_closure():
    model, optimizer, _, batches = setup(nn.Linear(6, 3), lbfgs)

    def train_step(_, batch):
        def closure():
            loss = mse_loss(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, optimizer, train_step, batches


def zeroed_too_early(step_first=False, set_to_none=True):
    model, optimizer, _, batches = setup()

    def train_step(_, batch):
        if step_first:
            optimizer.zero_grad()
            optimizer.step()
        mse_loss(model, batch).backward()
        if not step_first:
            optimizer.zero_grad(set_to_none)
            optimizer.step()

    return model, optimizer, train_step, batches


def detached(model, batch):
    return F.mse_loss(model(batch[0]).detach().requires_grad_(), batch[1])


# name -> the kinds that are found, and the training
FAULTS = {
    "not optimized": (["not_in_optimizer"], lambda: setup(make_optimizer=lambda model: sgd(model[:4]))),
    "forgotten layer": (["unused_parameters"], lambda: setup(Parts(unused=3), batches=make_batches(100))),
    "detached head": (["unused_parameters"], lambda: setup(Parts(detached=2), batches=make_batches(100))),
    "detached loss": (["no_gradients"], lambda: setup(loss_of=detached)),
    "detached loss, Adafactor": (["no_gradients"], lambda: setup(None, adafactor, loss_of=detached)),
    "zeroed before the step": (["no_gradients"], zeroed_too_early),
    "zeroed in place before the step": (["no_gradients"], lambda: zeroed_too_early(set_to_none=False)),
    "clipped to 0": (["no_gradients"], lambda: setup(clip=0.0)),
    "clipped to 0, with decay": (["no_gradients"], lambda: setup(make_optimizer=fused, clip=0.0, parts=2)),
    "multiplied by 0 in a hook": (["no_gradients"], lambda: setup(make_optimizer=multiplying)),
    "zeroed, and stepped before the backward": (["no_gradients"], lambda: zeroed_too_early(step_first=True)),
    "not zeroed, three steps in an iteration": (["gradients_not_zeroed"], lambda: three_steps(zero_at="never")),
    "not zeroed": (["gradients_not_zeroed"], lambda: setup(zero_at="never")),
    "not zeroed, micro-batches": (["gradients_not_zeroed"], lambda: setup(zero_at="never", parts=2)),
    "not zeroed, accumulated": (["gradients_not_zeroed"], lambda: setup(zero_at="never", every=3)),
    "not zeroed, fused and scaled": (
        ["gradients_not_zeroed"],
        lambda: setup(make_optimizer=fused, zero_at="never", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)),
    ),
    "not zeroed, after a buffer is full": (["gradients_not_zeroed"], late),
    "not zeroed, LBFGS": (["gradients_not_zeroed"], accumulating_closure),
    "not zeroed, clipped in a hook": (
        ["gradients_not_zeroed"],
        lambda: setup(make_optimizer=clipping, zero_at="never"),
    ),
    "not zeroed, and another optimizer": (
        ["gradients_not_zeroed"],
        lambda: setup(zero_at="never", after=lambda *_: sgd(nn.Linear(2, 2)).step()),
    ),
    "no step": (["no_step"], lambda: setup(parts=2, leave_out=lambda engine: True, batches=make_batches(101))),
    "replaced parameters": (["stale_optimizer"], replaced),
    "new head": (["stale_optimizer"], new_head),
    "zero rate": (["zero_learning_rate"], lambda: setup(make_optimizer=lambda model: sgd(model, 0.0))),
    "zero rate in a tensor": (["zero_learning_rate"], lambda: setup(make_optimizer=rate_in_a_tensor)),
    "momentum": (["large_momentum"], lambda: setup(make_optimizer=lambda model: sgd(model, momentum=0.999))),
    "evaluation mode": (["evaluation_mode"], lambda: setup(make_model().eval())),
    "repeated batch": (["batch_repeats"], lambda: setup(batches=repeated())),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, caplog):
    torch.manual_seed(0)
    expected, make = FAULTS[fault]
    kinds, check = checked(*make())
    assert kinds == expected
    (record,) = [record for record in caplog.records if record.name.endswith("SetupCheck")]
    assert record.levelno == logging.WARNING
    (finding,) = check.findings
    assert record.message == f"SetupCheck (setup): iteration {finding.iteration}: {finding.text}"
    assert check.reports == check.findings


def test_names_and_numbers_of_findings():
    found = {}
    for fault in ("not optimized", "forgotten layer", "new head", "zero rate", "evaluation mode", "no step"):
        _, check = checked(*FAULTS[fault][1]())
        found |= {finding.kind: finding for finding in check.findings}
    assert {kind: finding.names for kind, finding in found.items()} == {
        "not_in_optimizer": ("4.weight", "4.bias"),
        "unused_parameters": ("unused.weight", "unused.bias"),
        "stale_optimizer": ("4.weight", "4.bias"),
        "zero_learning_rate": (),
        "evaluation_mode": ("1", "3"),
        "no_step": (),
    }
    assert found["unused_parameters"].text.startswith("in the optimizer, but without a gradient in 100 iterations: ")
    assert "2 parameters of the optimizer are not the model's" in found["stale_optimizer"].text
    assert "in 3 optimizer steps" in found["zero_learning_rate"].text
    text = "SGD made no step in 100 iterations with 200 backward passes, whose gradients were discarded 99 times"
    assert found["no_step"].text.startswith(text)
    severities = {kind: finding.severity for kind, finding in found.items()}
    assert {kind for kind in severities if severities[kind] == "problem"} == {
        "not_in_optimizer", "stale_optimizer", "no_step",
    }  # fmt: skip


@pytest.mark.parametrize(("elements", "kinds"), [(5, []), (6, ["unused_parameters"])])
def test_a_small_part_without_a_gradient_is_no_finding(elements, kinds):
    """Mask tokens and prompt encoders of released models: 5 and 6 elements, and 99 with a gradient."""
    model = Parts(token=elements)
    assert sum(p.numel() for p in model.used.parameters()) == 99
    assert checked(*setup(model, batches=make_batches(100)))[0] == kinds


# Healthy training


def scale_gradients(optimizer, _):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.9)


def updated_by_hand():
    model = make_model()

    def update(*_):
        for parameter in model[3:].parameters():
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None

    return setup(model, lambda model: sgd(model[:3]), after=update)


class Signs(nn.Linear):
    """Weights of -1 and 1, which the train step moves by hand: their norm stays what it is."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.weight.data.sign_()
        self.latent = 0.01 * self.weight.detach()

    def update(self, *_):
        self.latent -= 0.1 * self.weight.grad
        self.weight.data.copy_(self.latent.sign())
        self.weight.grad = None


def signs_in_no_optimizer():
    model = nn.Sequential(nn.Linear(6, 5), Signs(5, 3))
    return setup(model, lambda model: sgd(model[0]), after=model[1].update, zero_at="end")


def signs_in_the_optimizer(steps=True):
    """The optimizer holds them too, and makes its steps, if any, without gradients."""
    model = nn.Sequential(Signs(6, 3))
    optimizer = sgd(model)

    def train_step(_, batch):
        mse_loss(model, batch).backward()
        model[0].update()
        if steps:
            optimizer.step()

    return model, optimizer, train_step, make_batches(101)


def second_optimizer():
    """It makes a step after the checked iterations."""
    model = make_model()
    second = sgd(model[3:])
    return setup(model, lambda model: sgd(model[:3]), after=lambda _, i: second.step() if i == 5 else None)


def teacher_inside():
    """A copy that is updated as a moving average, and requires gradients that it never gets."""
    model = nn.ModuleDict({"student": make_model()})
    result = setup(model, call=lambda x: model["student"](x) - model["teacher"](x).detach())
    model["teacher"] = copy.deepcopy(model["student"])
    return result


def gan(of_generator=True, detach=True):
    generator, discriminator = nn.Linear(6, 3), nn.Linear(3, 1)
    optimizers = sgd(generator), sgd(discriminator)

    def loss_of_discriminator(_, batch):
        fake = generator(batch[0])
        return discriminator(fake.detach() if detach else fake).mean() - discriminator(batch[1]).mean()

    def loss_of_generator(_, batch):
        return -discriminator(generator(batch[0])).mean()

    first = make_step(discriminator, optimizers[1], loss_of=loss_of_discriminator)
    second = make_step(generator, optimizers[0], loss_of=loss_of_generator)

    def train_step(*args):
        loss, _ = first(*args), second(*args)
        return {"generator": 0.5, "discriminator": loss.item()}

    which = 0 if of_generator else 1
    return (generator, discriminator)[which], optimizers[which], train_step


def warm_up(make, factor):
    model, optimizer, inner, batches = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return model, optimizer, lambda *args: (inner(*args), scheduler.step())[0], batches


def mode_set_in_the_train_step():
    model, optimizer, inner, batches = setup(make_model().eval(), every=8)  # no step shows the mode

    def train_step(engine, batch):
        model.train()
        loss = inner(engine, batch)
        model.eval()
        return loss

    return model, optimizer, train_step, batches


def partly_in_evaluation_mode():
    model = make_model()
    model[1].eval()
    return setup(model)


def frozen_backbone():
    """The optimizer holds the frozen parameters too."""
    model = make_model()
    model[0].requires_grad_(False)
    return setup(model, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))


def master_weights():
    """The optimizer holds float32 copies of weights in bfloat16, which they leave as they are in the first steps."""
    model = make_model().bfloat16()
    copies = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=1e-7)

    def train_step(_, batch):
        model.zero_grad()
        mse_loss(model, [item.bfloat16() for item in batch]).backward()
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(master)

    return model, optimizer, train_step


def other_batches(batches):
    """Batches that the train step does not train on."""
    used = itertools.cycle(make_batches(5))
    return setup(batches=batches, loss_of=lambda model, _: mse_loss(model, next(used)))


def called(wrap, model=None):
    model = model or make_model()
    return setup(model, call=wrap(model))


def experts(model):
    """Each expert is used in one of the first three iterations."""
    turns = itertools.cycle(model)
    return lambda x: next(turns)(x)


def rare_experts(count=20):
    """One of twenty experts at a time; the others may get no token for long."""
    model = nn.ModuleDict({"router": nn.Linear(6, 6), "experts": nn.ModuleList(nn.Linear(6, 3) for _ in range(count))})
    chosen = torch.randint(count - 2, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    return setup(model, call=lambda x: model["experts"][chosen.pop()](model["router"](x)), batches=make_batches(110))


class Averaging(torch.optim.AdamW):
    """Its momentum is that of a mean, as in torch's Muon, and no number."""

    def __init__(self, model):
        super().__init__([{"params": model.parameters(), "momentum": ("nesterov", 0.999)}])


class RateFree(torch.optim.Optimizer):
    """As transformers' Adafactor, it has a learning rate of None."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": None})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.01 * parameter.grad.sign())


HEALTHY = {
    "a loss of 0": lambda: setup(loss_of=lambda model, batch: 0 * mse_loss(model, batch)),
    "a branch that a short run does not reach": lambda: setup(Parts(unused=3)),
    "plain": setup,
    "zeroed after the step": lambda: setup(zero_at="end", set_to_none=False),
    "momentum by hand": lambda: setup(zero_at="never", after=scale_gradients),
    "accumulated over two": lambda: setup(every=2),
    "momentum of a mean": lambda: setup(make_optimizer=Averaging),
    "accumulated for long": lambda: setup(every=9, zero_at="end"),
    "LBFGS": lambda: setup(nn.Linear(6, 3), lbfgs, closure=True),
    "zeroed in a hook": lambda: setup(make_optimizer=zeroing, zero_at="never"),
    "unused expert": lambda: called(lambda m: m[1], nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])),
    "evaluation mode of layers without modes": lambda: setup(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)).eval()),
    "three steps in an iteration": three_steps,
    "evaluation mode of layers without running statistics": lambda: setup(
        nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    ),
    "no learning rate": lambda: setup(make_optimizer=RateFree),
    "integers": lambda: other_batches([[0]] * 30),
    "experts in turn": lambda: called(experts, nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])),
    "GAN, generator": gan,
    "GAN, discriminator": lambda: gan(of_generator=False),
    "GAN, not detached": lambda: gan(detach=False),
    "warm-up": lambda: warm_up(setup, lambda step: step / 10),
    "strings": lambda: other_batches([{"text": [f"item {i}"], "mask": torch.tensor([1, 0])} for i in range(5)]),
    "unknown objects": lambda: other_batches([(*make_batches(1)[0], object()) for _ in range(5)]),
    "an object that can't be compared": lambda: other_batches([(make_batches(1)[0], np.ones(3), np.ones(3))] * 5),
    "placeholders": lambda: other_batches([torch.zeros(1)] * 5),
    "signs that no optimizer moves": lambda: signs_in_the_optimizer(steps=False),
    "constant accuracy": lambda: setup(output=lambda loss: 0.1),
    "no loss": lambda: setup(output=lambda loss: {"loss": loss, "ids": ["a"], 3: None}),
    "checkpointed": lambda: called(lambda model: lambda x: checkpoint(model, x, use_reentrant=False)),
    "compiled": lambda: called(lambda model: torch.compile(model, backend="eager")),
    **{
        make.__name__: make
        for make in (
            *(second_optimizer, updated_by_hand, teacher_inside, mode_set_in_the_train_step, rare_experts),
            *(partly_in_evaluation_mode, frozen_backbone, master_weights),
            *(signs_in_no_optimizer, signs_in_the_optimizer),
        )
    },
}


@pytest.mark.parametrize("healthy", HEALTHY)
def test_nothing_is_found_in_healthy_training(healthy):
    torch.manual_seed(0)
    kinds, check = checked(*HEALTHY[healthy]())
    assert kinds == []
    assert check.findings is not None


def test_one_batch_per_epoch_is_full_batch_training():
    assert checked(*setup(batches=make_batches(1)), epochs=5)[0] == []


# Runs


def test_one_log_line_without_findings(caplog):
    model, optimizer, trainer = make_trainer()
    check = SetupCheck(model, optimizer)
    check.attach(trainer)
    with caplog.at_level(logging.INFO):
        trainer.run(make_batches(2))
        assert check.findings is None
        trainer.run(make_batches(5))
    assert check.findings == []
    lines = [record.message for record in caplog.records if record.name.endswith("SetupCheck")]
    assert lines == ["SetupCheck (setup): no problems found in 3 iterations with a step"]


def notes(model, optimizer, train_step, batches):
    kinds, check = checked(model, optimizer, train_step, batches)
    assert kinds == []
    return {finding.kind: finding for finding in check.findings}


def test_parameters_without_requires_grad_are_a_note():
    found = notes(*frozen_backbone())["requires_grad_false"]
    assert found.text == "2 of 6 parameters do not require gradients: 0.weight, 0.bias"
    assert (found.severity, found.names) == ("note", ("0.weight", "0.bias"))


def test_a_run_without_steps_is_a_note():
    """In reinforcement learning, backward and step may be in another handler."""
    model, optimizer, _ = make_trainer()
    found = notes(model.eval(), optimizer, lambda *_: None, make_batches(101))
    assert [*found] == ["no_step"]
    assert found["no_step"].text == "SGD made no step in 100 iterations with 0 backward passes: steps are not checked"
    assert checked(model, optimizer, lambda *_: None)[1].findings is None


def test_no_step_of_a_generator_in_the_warm_up_of_its_discriminator_is_a_note():
    """Its gradients, of the discriminator's loss, are discarded in each iteration."""
    generator, discriminator = nn.Linear(6, 3), nn.Linear(3, 1)
    waiting, other = torch.optim.Adam(generator.parameters()), sgd(discriminator)

    def train_step(_, batch):
        waiting.zero_grad()
        other.zero_grad()
        (discriminator(generator(batch[0])) - discriminator(batch[1])).square().mean().backward()
        other.step()

    found = notes(generator, waiting, train_step, make_batches(101))
    assert {kind: finding.text for kind, finding in found.items()} == {
        "no_step": "Adam made no step in 100 iterations with 100 backward passes: steps are not checked"
    }
    assert notes(discriminator, other, train_step, make_batches(5)) == {}


@pytest.mark.parametrize("first", [98, 99, 100, 101, math.inf])
@pytest.mark.parametrize("fault", ["not zeroed", "zero rate", "forgotten layer", None])
def test_the_check_waits_for_the_first_backward_and_step_for_100_iterations(first, fault, caplog):
    model, optimizer, inner, _ = FAULTS[fault][1]() if fault else setup()
    check = SetupCheck(model, optimizer)
    trainer = Engine(lambda engine, batch: inner(engine, batch) if engine.state.iteration >= first else None)
    check.attach(trainer)
    ended = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: ended.append(check.findings is not None))
    with caplog.at_level(logging.INFO):
        trainer.run(make_batches(120))
    assert ended.index(True) + 1 == 100
    expected = {}
    if first > 100:
        expected = {"no_step": "SGD made no step in 100 iterations with 0 backward passes: steps are not checked"}
    elif fault == "not zeroed" and first <= 98:
        text = "the backward after each of 2 steps added to the gradients of that step: call optimizer.zero_grad()"
        expected = {"gradients_not_zeroed": text}
    elif fault == "zero rate" and first <= 99:
        count = 101 - first
        text = f"the learning rate of all parameter groups was 0 in {count} optimizer steps"
        expected = {"zero_learning_rate": text}
    elif fault == "forgotten layer":
        text = f"in the optimizer, but without a gradient in {101 - first} iterations: "
        expected = {"unused_parameters": f"{text}unused.weight, unused.bias"}
    assert {finding.kind: finding.text for finding in check.findings} == expected
    assert {finding.severity for finding in check.findings} <= (
        {"problem", "warning"} if {*expected} & {"gradients_not_zeroed", "zero_learning_rate"} else {"note"}
    )
    if not expected:
        lines = [record.message for record in caplog.records if record.name.endswith("SetupCheck")]
        text = f"SetupCheck (setup): no problems found in {101 - first} iterations with a step"
        assert lines == [text] * (101 - first >= 3)  # too little was seen in fewer


def test_each_run_from_its_start_is_checked_and_a_resumed_one():
    model, optimizer, train_step, _ = setup()
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    for faulty in (False, True, False):
        model.train(not faulty)
        trainer.run(make_batches(4))
        assert [finding.kind for finding in check.findings] == ["evaluation_mode"] * faulty
    other = SetupCheck(model, optimizer)
    resumed = Engine(train_step)
    other.attach(resumed)
    resumed.load_state_dict({"iteration": 4, "epoch_length": 8, "max_epochs": 1})
    seen = []
    resumed.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append((e.state.iteration, other.findings)))
    resumed.run(make_batches(8))
    assert seen == [(5, None), (6, None), (7, []), (8, [])]


@pytest.mark.parametrize(("count", "severity"), [(20, "note"), (110, "warning")])
def test_all_is_reported_at_once_where_parameters_lack_a_gradient(count, severity):
    """After 100 iterations, or at the end of a shorter run: a gradient may come."""
    model, optimizer, train_step, batches = setup(Parts(unused=3), zero_at="never", batches=make_batches(count))
    trainer, check, seen = Engine(train_step), SetupCheck(model, optimizer), []
    check.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(check.findings is not None))
    trainer.run(batches)
    found = [(finding.iteration, finding.kind, finding.severity) for finding in check.findings]
    at = min(count, 100)
    assert found == [(at, "gradients_not_zeroed", "problem"), (at, "unused_parameters", severity)]
    assert sum(seen) == max(0, count - 99)


def test_run_that_was_terminated_early_says_nothing(caplog):
    model, optimizer, train_step, batches = setup(zero_at="never")
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    with caplog.at_level(logging.INFO):
        trainer.run(batches)
    assert check.findings is None
    assert not [record for record in caplog.records if record.name.endswith("SetupCheck")]


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inner", [True, False])
def test_wrapper(process_group, inner):
    model = DistributedDataParallel(make_model())
    kinds, _ = checked(*setup(model, call=model.module if inner else None))
    assert kinds == ["wrapper_bypassed"] * inner


def test_a_filter_says_where_the_check_begins():
    running = []
    model, optimizer, train_step, batches = setup(after=lambda *_: running.append(check._is_running))
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer, Events.ITERATION_STARTED(every=3))
    trainer.run(batches[:10])
    assert running == [False, False, True, True, True, False, False, False, False, False]


@pytest.mark.parametrize(("options", "kinds"), [({"zero_at": "never"}, ["gradients_not_zeroed"]), ({"every": 2}, [])])
def test_gradients_that_are_not_zeroed_are_found_whatever_the_filter(options, kinds):
    for filters in ({"every": 2}, {"once": 4}, {"event_filter": lambda _, iteration: iteration % 3 == 1}):
        model, optimizer, train_step, batches = setup(**options)
        trainer, check = Engine(train_step), SetupCheck(model, optimizer)
        check.attach(trainer, Events.ITERATION_STARTED(**filters))
        trainer.run(batches)
        assert [finding.kind for finding in check.findings] == kinds


@pytest.mark.parametrize("event", ["GRADIENTS_READY", "OPTIMIZER_STEP_STARTED", "OPTIMIZER_STEP_COMPLETED"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("closure", [False, True])
def test_detached_by_a_handler_in_the_train_step(event, at, closure):
    """Torch goes through the hooks of all optimizers meanwhile."""

    def train(watched):
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        trainer = Engine(make_step(model, optimizer, closure=closure))
        before = hooks_only(footprint(trainer, model, optimizer))
        if watched:
            handle = attach_monitors(trainer, model, optimizer, loggers=[])
            trainer.add_event_handler(MonitorEvents[event](once=at), lambda _: handle.remove())
        trainer.run(make_batches(6))
        after = hooks_only(footprint(trainer, model, optimizer))
        return model.state_dict(), optimizer.state_dict(), {key: after[key] == before[key] for key in before}

    expected, actual = train(False), train(True)
    assert_same(actual[:2], expected[:2])
    assert actual[2] == expected[2]


@pytest.mark.allows_failed_monitors
def test_an_error_of_the_check_in_a_step_does_not_end_training(monkeypatch):
    monkeypatch.setattr(Evidence, "note_step", lambda *_: 1 / 0)
    model, optimizer, train_step, batches = setup()
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.run(batches)
    assert trainer.state.iteration == len(batches)
    assert [report.kind for report in check.reports] == ["failed"]


@pytest.mark.parametrize("calls_train", [False, True])
def test_a_validation_that_leaves_evaluation_mode_on_is_reported_once(calls_train):
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def train_step(engine, batch):
        if calls_train:
            model.train()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: model.eval())
    trainer.run(list(torch.randn(40, 6, 5)), max_epochs=4)
    expected = [] if calls_train else [(50, "evaluation_mode", ("1", "3"))]
    assert [(found.iteration, found.kind, found.names) for found in check.findings] == expected


def test_wrong_arguments():
    model, optimizer, _ = make_trainer()
    with pytest.raises(ValueError, match="Argument prefix"):
        SetupCheck(model, optimizer, prefix="ä")
    for wrong in ((model, None), (3, optimizer)):
        with pytest.raises(TypeError, match="Argument"):
            SetupCheck(*wrong)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_a_check_starts_leaves_no_hook(monkeypatch, error):
    def raise_error(*_):
        raise error("no memory")

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(make_step(model, optimizer))
    before = footprint(engine, model, optimizer)["_global_optimizer_post_hooks"]
    check = SetupCheck(model, optimizer)
    monkeypatch.setattr(check, "_start_probe", raise_error)
    with check.attach(engine), contextlib.suppress(error):
        engine.run(make_batches(2))
    assert footprint(engine, model, optimizer)["_global_optimizer_post_hooks"] == before
