"""SetupCheck: every finding by a fault that makes it, and none on healthy train steps."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import GradMonitor, SetupCheck
from tests._helpers import make_batches, make_model, make_trainer


def checked(train_step, model, optimizer, batches=None, *, epochs=1, others=(), **arguments):
    """The kinds of all findings of a run, and the check."""
    check = SetupCheck(model, optimizer, **arguments)
    trainer = Engine(train_step)
    check.attach(trainer)
    for other in others:
        other.attach(trainer)
    trainer.run(make_batches(5) if batches is None else batches, max_epochs=epochs)
    return [finding.kind for finding in check.findings or []], check


def sgd(model, lr=0.05, **arguments):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **arguments)


def step_with(model, optimizer, *, loss=F.mse_loss, zero=True, step=lambda iteration: True, output=None, call=None):
    def train_step(engine, batch):
        if zero:
            optimizer.zero_grad()
        value = loss((call or model)(batch[0]), batch[1])
        value.backward()
        if step(engine.state.iteration):
            optimizer.step()
        return value.item() if output is None else output(value)

    return train_step


# Faults: name -> (model, optimizer, train step, batches)


def not_optimized():
    model = make_model()
    optimizer = torch.optim.SGD([*model.parameters()][:-2], lr=0.05)
    return model, optimizer, step_with(model, optimizer)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = make_model(), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def no_gradient():
    model = Unused()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer)


def gradients_not_zeroed():
    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer, zero=False)


def stale_optimizer():
    model = make_model()
    optimizer = sgd(model)
    for module in model:
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return model, optimizer, step_with(model, optimizer)


def stale_head():
    model = make_model()
    optimizer = sgd(model)
    model[-1] = nn.Linear(8, 3)
    return model, optimizer, step_with(model, optimizer)


def zero_learning_rate():
    model = make_model()
    optimizer = sgd(model, lr=0.0)
    return model, optimizer, step_with(model, optimizer)


def zero_learning_rate_in_a_tensor():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0), capturable=False, foreach=False)
    return model, optimizer, step_with(model, optimizer)


def eval_mode():
    model = make_model().eval()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer)


def repeated_batch():
    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer), [copy.deepcopy(make_batches(1)[0]) for _ in range(4)]


def constant_loss():
    model = nn.Linear(6, 3)
    optimizer = sgd(model, lr=1e-30)
    return model, optimizer, step_with(model, optimizer), [copy.deepcopy(make_batches(1)[0]) for _ in range(4)]


def low_precision_updates():
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in make_batches(5)]
    return model, optimizer, step_with(model, optimizer), batches


FAULTS = {
    not_optimized: ["not_optimized"],
    no_gradient: ["no_gradient"],
    gradients_not_zeroed: ["gradients_not_zeroed"],
    stale_optimizer: ["stale_optimizer"],
    stale_head: ["stale_optimizer"],
    zero_learning_rate: ["zero_learning_rate"],
    zero_learning_rate_in_a_tensor: ["zero_learning_rate"],
    eval_mode: ["eval_mode"],
    repeated_batch: ["repeated_batch"],
    constant_loss: ["repeated_batch", "constant_loss"],
    low_precision_updates: ["low_precision_updates"],
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault, caplog):
    torch.manual_seed(0)
    model, optimizer, train_step, *batches = fault()
    kinds, check = checked(train_step, model, optimizer, *batches)
    assert kinds == FAULTS[fault]
    (record,) = [record for record in caplog.records if record.name.endswith("SetupCheck")]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"SetupCheck (setup): iterations 1 to 3: problems found ({len(kinds)}):\n")
    assert all(f"\n  {finding.kind}: {finding.text}" in record.message for finding in check.findings)


def test_names_and_numbers_of_texts():
    texts = {}
    for fault in (not_optimized, no_gradient, stale_head, zero_learning_rate):
        model, optimizer, train_step = fault()
        _, check = checked(train_step, model, optimizer)
        texts |= {finding.kind: finding.text for finding in check.findings}
    assert "4.weight, 4.bias. " in texts["not_optimized"]
    assert "in the first 3 iterations: unused.weight, unused.bias" in texts["no_gradient"]
    assert "2 parameters of the optimizer are not the model's" in texts["stale_optimizer"]
    assert "4.weight, 4.bias are in none" in texts["stale_optimizer"]
    assert "in 3 optimizer steps" in texts["zero_learning_rate"]


def test_one_log_line_without_findings(caplog):
    model, optimizer, trainer = make_trainer()
    check = SetupCheck(model, optimizer, iterations=4)
    check.attach(trainer)
    with caplog.at_level(logging.INFO):
        trainer.run(make_batches(3))
        assert check.findings is None
        trainer.run(make_batches(5))
    assert check.findings == []
    lines = [record.message for record in caplog.records if record.name.endswith("SetupCheck")]
    assert lines == ["SetupCheck (setup): iterations 1 to 4: no problems found"]


def scaled(scaler_of_monitor):
    model = make_model()
    optimizer, scaler = sgd(model), GradScaler("cpu", init_scale=1024.0)

    def train_step(_, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    monitors = GradMonitor(model, optimizer, scaler=scaler if scaler_of_monitor else None)
    return checked(train_step, model, optimizer, others=[monitors])


def test_scaler_that_was_not_given():
    kinds, check = scaled(False)
    assert kinds == ["scaler_not_given"]
    assert "GradMonitor (grad)" in check.findings[0].text
    assert scaled(True)[0] == []


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inner", [True, False])
def test_wrapper(process_group, inner):
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model)
    kinds, _ = checked(step_with(model, optimizer, call=model.module if inner else None), model, optimizer)
    assert kinds == ["wrapper_bypassed"] * inner


# Healthy train steps: name -> (model, optimizer, train step, batches)


def plain():
    model = make_model()
    return model, (optimizer := sgd(model)), step_with(model, optimizer)


def zeroed_after_the_step():
    model = make_model()
    optimizer = sgd(model)

    def train_step(_, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return model, optimizer, train_step


def momentum_by_hand():
    model = make_model()
    optimizer = sgd(model)

    def train_step(_, batch):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return model, optimizer, train_step


def accumulated_for_long():
    """No step in the checked iterations, so there is nothing to say of steps."""
    model = Unused()
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.0)
    return model, optimizer, step_with(model, optimizer, zero=False, step=lambda iteration: iteration % 8 == 0)


def accumulated_over_two():
    model = make_model()
    optimizer = sgd(model)

    def train_step(engine, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward()
        if engine.state.iteration % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, train_step


def frozen_backbone():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # holds the frozen parameters too
    return model, optimizer, step_with(model, optimizer)


def two_optimizers():
    """The second one makes a step after the checked iterations."""
    model = make_model()
    first, second = torch.optim.SGD(model[:3].parameters(), lr=0.05), torch.optim.SGD(model[3:].parameters(), lr=0.05)

    def train_step(engine, batch):
        first.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        first.step()
        if engine.state.iteration == 5:
            second.step()

    return model, first, train_step


def updated_by_hand():
    model = make_model()
    optimizer = sgd(model[:3])

    def train_step(_, batch):
        model.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model[3:].parameters():
                parameter -= 0.01 * parameter.grad

    return model, optimizer, train_step


def lbfgs():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def train_step(_, batch):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    return model, optimizer, train_step


def gan(of_generator=True, detach=True):
    generator, discriminator = nn.Linear(6, 3), nn.Linear(3, 1)
    optimizers = sgd(generator), sgd(discriminator)

    def train_step(_, batch):
        fake = generator(batch[0])
        optimizers[1].zero_grad()
        loss = discriminator(fake.detach() if detach else fake).mean() - discriminator(batch[1]).mean()
        loss.backward(retain_graph=not detach)
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-discriminator(generator(batch[0]))).mean().backward()
        optimizers[0].step()
        return {"generator": 0.5, "discriminator": loss.item()}

    which = 0 if of_generator else 1
    return (generator, discriminator)[which], optimizers[which], train_step


def warm_up():
    model = make_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    inner = step_with(model, optimizer)

    def train_step(engine, batch):
        loss = inner(engine, batch)
        scheduler.step()
        return loss

    return model, optimizer, train_step


def warm_up_in_bfloat16():
    model, optimizer, _, batches = low_precision_updates()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1)
    inner = step_with(model, optimizer)
    return model, optimizer, lambda engine, batch: (inner(engine, batch), scheduler.step()), batches


def mode_set_in_the_train_step():
    model = make_model().eval()
    optimizer = sgd(model)
    inner = step_with(model, optimizer)

    def train_step(engine, batch):
        model.train()
        loss = inner(engine, batch)
        model.eval()
        return loss

    return model, optimizer, train_step


def partly_in_evaluation_mode():
    model = make_model()
    model[1].eval()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer)


def strings_in_the_batch():
    model = make_model()
    optimizer = sgd(model)
    inner, data = step_with(model, optimizer), make_batches(5)
    batches = [{"text": [f"sentence {i}"], "mask": torch.tensor([1, 0])} for i in range(5)]
    return model, optimizer, lambda engine, batch: inner(engine, data[engine.state.iteration - 1]), batches


def unknown_objects_in_the_batch():
    model, optimizer, train_step = plain()
    batches = [(*make_batches(1)[0], object()) for _ in range(4)]
    return model, optimizer, lambda engine, batch: train_step(engine, batch[:2]), batches


def placeholder_batches():
    model, optimizer, inner = plain()
    data = make_batches(5)
    return model, optimizer, lambda engine, batch: inner(engine, data[engine.state.iteration - 1]), [torch.zeros(1)] * 5


def constant_accuracy():
    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer, output=lambda loss: 0.1)


def no_output():
    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer, output=lambda loss: {"loss": loss, "ids": ["a"], 3: None})


def every_second_iteration():
    """In the first three iterations each expert is used."""
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizer = sgd(model)

    def train_step(engine, batch):
        optimizer.zero_grad()
        F.mse_loss(model[engine.state.iteration % 2](batch[0]), batch[1]).backward()
        optimizer.step()

    return model, optimizer, train_step


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer, call=lambda x: checkpoint(model, x, use_reentrant=False))


def teacher_inside():
    """A copy that is updated as a moving average, and requires gradients that it never gets."""
    model = nn.ModuleDict({"student": make_model()})
    optimizer = sgd(model)
    model["teacher"] = copy.deepcopy(model["student"])

    def train_step(_, batch):
        optimizer.zero_grad()
        with torch.no_grad():
            target = model["teacher"](batch[0])
        F.mse_loss(model["student"](batch[0]), target + batch[1]).backward()
        optimizer.step()

    return model, optimizer, train_step


def master_weights():
    """The optimizer holds float32 copies of weights in bfloat16, which get their values after the step."""
    model = make_model().bfloat16()
    copies = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.5)

    def train_step(_, batch):
        model.zero_grad()
        F.mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16()).backward()
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(master)

    return model, optimizer, train_step


def compiled():
    model = make_model()
    optimizer = sgd(model)
    return model, optimizer, step_with(model, optimizer, call=torch.compile(model, backend="eager"))


HEALTHY = [
    *(
        plain,
        zeroed_after_the_step,
        momentum_by_hand,
        accumulated_for_long,
        accumulated_over_two,
        frozen_backbone,
        two_optimizers,
    ),
    *(updated_by_hand, lbfgs, gan, lambda: gan(of_generator=False), lambda: gan(detach=False), warm_up),
    *(warm_up_in_bfloat16, mode_set_in_the_train_step, partly_in_evaluation_mode, strings_in_the_batch),
    *(unknown_objects_in_the_batch, placeholder_batches, constant_accuracy, no_output, every_second_iteration),
    *(checkpointed, teacher_inside, master_weights, compiled),
]


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.__name__)
def test_nothing_is_found_in_healthy_training(healthy):
    torch.manual_seed(0)
    model, optimizer, train_step, *batches = healthy()
    kinds, check = checked(train_step, model, optimizer, *batches)
    assert kinds == []
    assert check.findings == []


def test_one_batch_per_epoch_is_full_batch_training():
    model, optimizer, train_step = plain()
    kinds, _ = checked(train_step, model, optimizer, make_batches(1), epochs=5)
    assert kinds == []


# Runs


def test_model_that_is_never_run(caplog):
    """As in reinforcement learning, where backward and step are in another handler."""
    model, optimizer, _ = make_trainer()
    model.eval()
    kinds, check = checked(lambda *_: None, model, optimizer)
    assert kinds == check.findings == []


def test_each_run_from_its_start_is_checked_and_a_resumed_one():
    model, optimizer, train_step = plain()
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    for faulty in (False, True, False):
        model.train(not faulty)
        trainer.run(make_batches(4))
        assert [finding.kind for finding in check.findings] == ["eval_mode"] * faulty
    other = SetupCheck(model, optimizer)
    resumed = Engine(train_step)
    other.attach(resumed)
    resumed.load_state_dict({"iteration": 4, "epoch_length": 8, "max_epochs": 1})
    seen = []
    resumed.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append((e.state.iteration, other.findings)))
    resumed.run(make_batches(8))
    assert seen == [(5, None), (6, None), (7, []), (8, [])]


def test_run_that_was_terminated_early_says_nothing(caplog):
    model, optimizer, train_step = gradients_not_zeroed()
    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    with caplog.at_level(logging.INFO):
        trainer.run(make_batches(5))
    assert check.findings is None
    assert not [record for record in caplog.records if record.name.endswith("SetupCheck")]
    assert check._evidence is None


def test_two_engines_and_filters():
    checks = []
    for fault in (zero_learning_rate, plain):
        model, optimizer, train_step = fault()
        check = SetupCheck(model, optimizer)
        trainer = Engine(train_step)
        check.attach(trainer, Events.ITERATION_STARTED(every=2))
        checks.append((trainer, check))
    for trainer, _ in checks:
        trainer.run(make_batches(6))
    assert [[finding.kind for finding in check.findings] for _, check in checks] == [["zero_learning_rate"], []]


def test_one_iteration_is_enough_for_what_needs_no_comparison():
    for fault, expected in ((eval_mode, ["eval_mode"]), (gradients_not_zeroed, []), (zero_learning_rate, [])):
        model, optimizer, train_step = fault()
        assert checked(train_step, model, optimizer, iterations=1)[0] == expected


def test_later_iterations_are_not_monitored():
    model, optimizer, train_step = plain()
    check = SetupCheck(model, optimizer)
    running = []

    def observed(engine, batch):
        running.append(check._is_running)
        return train_step(engine, batch)

    trainer = Engine(observed)
    check.attach(trainer)
    trainer.run(make_batches(5))
    assert running == [True, True, True, False, False]


def test_wrong_arguments():
    model, optimizer, _ = make_trainer()
    for wrong in ({"iterations": 0}, {"prefix": "ä"}):
        with pytest.raises(ValueError, match=f"Argument {next(iter(wrong))}"):
            SetupCheck(model, optimizer, **wrong)
    for wrong in ((model, None), (3, optimizer)):
        with pytest.raises(TypeError, match="Argument"):
            SetupCheck(*wrong)


def test_supervised_trainer():
    model, optimizer, _ = make_trainer()
    trainer, check = create_supervised_trainer(model, optimizer, F.mse_loss), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.run(make_batches(4))
    assert check.findings == []
