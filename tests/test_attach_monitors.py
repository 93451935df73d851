"""One line attaches the usual monitors, and one detaches them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import re
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, State, create_supervised_trainer
from ignite.engine.events import EventEnum
from ignite.handlers import Checkpoint
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HDF5Logger,
    MonitorEvents,
    SpikeMonitor,
    StaticThreshold,
    attach_monitors,
    read_hdf5,
)
from ignite_monitor.events.monitor_events import register_events
from ignite_monitor.model.isolation import capture_rng_state, restore_rng_state
from tests._helpers import ListLogger, footprint, grad_norm, in_turn, make_batches, make_step, make_trainer, same
from tests._models import GPT


@pytest.fixture
def parts():
    return make_trainer()


def families(named):
    return {name.split("/")[0] for name in named}


@pytest.mark.parametrize("every", [1, 4])
def test_who_watches_when_and_who_hears_of_it(parts, every):
    model, optimizer, trainer = parts
    loggers = [ListLogger(), ListLogger()]
    attach_monitors(trainer, model, optimizer, loggers=loggers, every=every)
    trainer.run(make_batches(8))
    for logger in loggers:
        steps = {family: [step for step, named in logger.written if family in families(named)] for family in
                 ("grad", "monitor", "activation")}  # fmt: skip
        assert steps["grad"] == list(range(1, 9))
        monitored = [step for step in range(1, 9) if step % every == 0 or (step < every and step in (1, 2, 3, 5))]
        assert steps["monitor"] == steps["activation"] == monitored
    metrics = trainer.state.metrics
    assert {f"activation/_root_/{name}" for name in ("std", "max_abs", "dead_fraction", "nonfinite_count")} <= {
        *metrics
    }
    assert not any(name.endswith(("/mean", "/l2_norm")) for name in metrics if name.startswith("activation/"))


def test_first_iterations_are_monitored_too(parts):
    model, optimizer, trainer = parts
    logger = ListLogger()
    attach_monitors(trainer, model, optimizer, loggers=logger, every=100)
    trainer.run(make_batches(110))
    steps = [step for step, named in logger.written if "step/lr/group_0" in named]
    assert steps == [1, 2, 3, 5, 10, 20, 50, 100]


def test_loggers_get_a_selection_and_files_all(tmp_path):
    torch.manual_seed(0)
    model = GPT(blocks=3, records=True, fused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, lambda y, targets: F.cross_entropy(y.mT, targets))
    logger, path = ListLogger(), tmp_path / "run.h5"
    with HDF5Logger(path) as file:
        attach_monitors(trainer, model, optimizer, loggers=[logger, file], every=1, prefix="gpt")
        trainer.run([torch.randint(11, (2, 3, 6)) for _ in range(2)])
    families = ("gpt/activation", "gpt/attention", "gpt/recorded")
    written = {name for _, named in logger.written for name in named if name.startswith(families)}
    outline = ["_root_", "tokens", "positions", "drop", "norm", "head", "blocks.0", "blocks.1", "blocks.2"]
    assert written == {
        *(f"gpt/activation/{module}/{metric}" for module in outline for metric in ("std", "max_abs")),
        *(f"gpt/activation/{module}/dead_fraction" for module in outline[:3] + outline[4:6]),
        "gpt/activation/_root_/nonfinite_count",
        *(f"gpt/recorded/blocks.{i}.mlp/norm" for i in range(3)),
        *(
            f"gpt/attention_{kind}/blocks.{i}.attention/head_{head}"
            for kind in ("entropy", "logit_max")
            for i in range(3)
            for head in range(2)
        ),
    }
    kept = set(read_hdf5(path))
    assert written < kept
    assert "gpt/activation/blocks.1.mlp.0/std" in kept
    assert "gpt/attention_entropy/blocks.1.attention/head_0" in kept


class Wrapped(nn.Module):
    """Outputs as of transformers: a tuple of each block, and a mapping of the model."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.h = nn.ModuleList([nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 6)])
        self.body.h[0].forward = lambda x: (self.body.h[0][0](x), None)

    def forward(self, x):
        x = self.body.h[1](self.body.h[0](x)[0])
        return {"logits": x[:, :3], "cache": (x, x)}


def test_outputs_with_a_place_reach_loggers():
    model, logger = Wrapped(), ListLogger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, optimizer, loss_of=lambda model, batch: model(batch)["logits"].square().mean())
    trainer = Engine(step)
    attach_monitors(trainer, model, optimizer, loggers=logger)
    trainer.run([torch.ones(2, 6)])
    written = {name for _, named in logger.written for name in named if name.startswith("activation")}
    assert written == {
        *(
            f"activation/{tag}/{metric}"
            for tag in ("_root_/logits", "body.h.0/0", "body.h.1")
            for metric in ("std", "max_abs")
        ),
        *(f"activation/{tag}/dead_fraction" for tag in ("body.h.0/0", "body.h.1")),
        *(f"activation/_root_/{place}/nonfinite_count" for place in ("logits", "cache/0", "cache/1")),
    }


def test_loggers_get_the_share_of_each_layer_of_a_coordinate_check_and_files_all(tmp_path):
    model, optimizer, trainer = make_trainer()
    logger = ListLogger()
    with HDF5Logger(tmp_path / "run.h5") as file:
        attach_monitors(trainer, model, optimizer, loggers=[logger, file], every=1, extra=["rcc"])
        trainer.run(make_batches(2))
    written = {name for _, named in logger.written for name in named if name.startswith("rcc/")}
    kept = {name for name in read_hdf5(tmp_path / "run.h5") if name.startswith("rcc/")}
    whole = {f"rcc/{term}_{which}" for term in ("weight_update", "input_drift") for which in ("max", "median")}
    assert written == whole | {name for name in kept if "weight_share/" in name}


def test_gan():
    """Each model's norms against its own gradients in float64, whatever the other one's backward leaves there."""
    torch.manual_seed(0)
    models = {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    expected, got = {name: [] for name in models}, {name: [] for name in models}

    def step(name, loss_of):
        def check(engine):
            expected[name].append(pytest.approx(grad_norm(models[name]), rel=1e-6))
            assert not getattr(engine.state, f"{name}_unhealthy_spike")

        return make_step(models[name], optimizers[name], loss_of=loss_of, before_step=check)

    def fake():
        return models["generator"](torch.randn(8, 3))

    of_discriminator = step("discriminator", lambda model, real: model(fake().detach()).mean() - model(real).mean())
    of_generator = step("generator", lambda *_: -models["discriminator"](fake()).mean())
    trainer = Engine(in_turn(of_discriminator, of_generator))
    for name, model in models.items():
        attach_monitors(trainer, model, optimizers[name], prefix=name, every=1)

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        for name, values in got.items():
            values.append(float(engine.state.metrics[f"{name}/grad/norm"]))
            assert f"{name}/monitor/update_ratio_median" in engine.state.metrics
            assert f"{name}/activation/_root_/std" in engine.state.metrics

    trainer.run([torch.randn(8, 4) for _ in range(4)])
    assert got == expected


@pytest.mark.parametrize(
    ("on_spike", "counted"), [(None, "spike_count"), ("skip", "skipped_count"), ("clip", "clipped_count")]
)
def test_rule_reaction_and_flag_are_those_of_the_gradient_monitor(parts, on_spike, counted):
    model, optimizer, trainer = parts
    before = [parameter.detach().clone() for parameter in model.parameters()]
    arguments = {"threshold": StaticThreshold(1e-9)}
    attach_monitors(trainer, model, optimizer, **arguments, on_spike=on_spike, prefix="2-a")
    trainer.run(make_batches(3))
    assert all(map(torch.equal, before, model.parameters())) is (on_spike == "skip")
    assert trainer.state._2_a_unhealthy_spike is True
    assert trainer.state.metrics[f"2-a/grad/{counted}"] == 3


def test_leaves_as_it_came(parts):
    model, optimizer, trainer = parts
    trainer.run(make_batches(2))
    before = footprint(trainer, model, optimizer)
    handle = attach_monitors(trainer, model, optimizer, loggers=ListLogger(), every=1)
    trainer.run(make_batches(2))
    for _ in range(2):
        handle.remove()
        assert footprint(trainer, model, optimizer) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loggers": "run.h5"}, r"Argument loggers should be of type .*HDF5Logger\('run.h5'\)"),
        ({"loggers": ["run.h5"]}, r"Argument loggers should be of type .*HDF5Logger\('run.h5'\)"),
        ({"loggers": None}, "Argument loggers should be of type BaseLogger"),
        ({"rollback": True}, "Argument rollback should be of type Mapping"),
    ],
)
def test_arguments_of_another_type_are_named(parts, given, message):
    model, optimizer, trainer = parts
    with pytest.raises(TypeError, match=message):
        attach_monitors(trainer, model, optimizer, **given)
    assert not trainer.state.metrics


def test_what_fails_half_way_leaves_nothing(parts):
    model, optimizer, trainer = parts
    GradMonitor(model, prefix="monitor").attach(trainer)
    trainer.state.metrics.clear()
    before = footprint(trainer, model, optimizer)
    with pytest.raises(ValueError, match=r"claimed|prefix"):
        attach_monitors(trainer, model, optimizer, loggers=ListLogger())
    assert footprint(trainer, model, optimizer) == before


class OwnAdam(torch.optim.Adam):
    """An optimizer that may do anything in its step."""


def test_what_is_cheap_is_there_and_the_rest_by_name():
    model, optimizer, trainer = make_trainer()
    with attach_monitors(trainer, model, optimizer, every=1) as handle:
        assert set(handle.monitors) == {"grad", "loss", "setup", "update", "activation", "step", "moments"}
        with pytest.raises(ValueError, match=r"claimed.*remove\(\) its handle"):
            attach_monitors(trainer, model, optimizer)
    with attach_monitors(trainer, model, torch.optim.SGD(model.parameters(), lr=0.1)) as handle:
        assert "moments" not in handle.monitors  # without momentum
    with attach_monitors(trainer, model, OwnAdam(model.parameters())) as handle:
        assert "moments" not in handle.monitors  # only those of torch's own classes are known
    attach_monitors(trainer, model, optimizer, every=1, extra=["histograms", "replicas", "spectral", "rcc"])
    trainer.run(make_batches(2))
    assert {"step", "optimizer", "histograms", "replicas", "spectral", "rcc"} <= families(trainer.state.metrics)


class Offline(ListLogger):
    """Fails after it has made some handlers."""

    def __init__(self, made=0):
        super().__init__()
        self.left = made

    def _create_output_handler(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("no login")
        return super()._create_output_handler(*args, **kwargs)


@pytest.mark.parametrize("made", range(8))
def test_a_logger_that_fails_leaves_nothing(parts, made):
    model, optimizer, trainer = parts
    before = footprint(trainer, model, optimizer)
    with pytest.raises(ConnectionError):
        attach_monitors(trainer, model, optimizer, loggers=Offline(made))
    with pytest.raises(ConnectionError):
        ActivationHandler(model, activations=True).log_to(Offline(min(made, 1)), trainer)
    assert footprint(trainer, model, optimizer) == before


class OtherEvents(EventEnum):
    OTHER = "other"


REFUSED = {
    "another logger": lambda engine, parts, file: attach_monitors(engine, *parts, loggers=[file, Offline(4)]),
    "a taken flag": lambda engine, parts, file: (
        setattr(engine.state, "unhealthy_spike", True),
        attach_monitors(engine, *parts, loggers=file),
    ),
    "another training's file": lambda engine, parts, file: attach_monitors(
        engine, *parts, loggers=[file, HDF5Logger(file.path.with_name("b.h5"), trainer=Engine(print))]
    ),
    "an unknown event": lambda engine, parts, file: (
        (monitor := GradMonitor(parts[0])).report("refused", "must not reach the file"),
        monitor.log_to(file, engine, Events.EPOCH_COMPLETED | OtherEvents.OTHER),
    ),
    "an event without a count": lambda engine, parts, file: file.attach(engine, print, Events.EXCEPTION_RAISED),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_refused_call_leaves_a_file_to_another_training(tmp_path, refused, monkeypatch):
    """The first trainer keeps none of its handlers, and the file has the values and reports of the second one alone."""
    monkeypatch.setitem(State.event_to_attr, OtherEvents.OTHER, "iteration")
    (*parts, first), (*others, second) = make_trainer(), make_trainer()
    handlers = footprint(first, *parts)["handlers"]
    with HDF5Logger(tmp_path / "a.h5") as file:
        with pytest.raises((ValueError, RuntimeError, ConnectionError)):
            refused(first, parts, file)
        assert footprint(first, *parts)["handlers"] == handlers
        first.run(make_batches(3))
        with attach_monitors(second, *others, loggers=file):
            second.run(make_batches(5))
    recording = read_hdf5(tmp_path / "a.h5")
    assert recording.iterations("grad/norm").tolist() == [1, 2, 3, 4, 5]
    assert {*recording.runs("grad/norm")} == {0}
    assert [report for report in recording.reports if report.kind == "refused"] == []


WITHIN = [
    Events.EPOCH_STARTED(once=1),
    Events.GET_BATCH_STARTED(once=3),
    Events.ITERATION_STARTED(once=3),
    MonitorEvents.GRADIENTS_READY(once=3),
    MonitorEvents.OPTIMIZER_STEP_STARTED(once=3),
    Events.ITERATION_COMPLETED(once=3),
]


@pytest.mark.parametrize("event", WITHIN)
def test_attached_in_a_handler(parts, event):
    model, optimizer, trainer = parts
    GradMonitor(model, optimizer, prefix="first", flag="first").attach(trainer)
    calls, norms = [], []

    @trainer.on(event)
    def attach(engine):
        calls.append(engine.state.iteration)
        attach_monitors(engine, model, optimizer, every=1, rollback={"model": model, "optimizer": optimizer})

    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: norms.append(engine.state.metrics["first/norm"])
    )
    trainer.run(make_batches(5))
    assert len(calls) == 1
    assert len(norms) == 5
    assert trainer.state.metrics["grad/norm"] == trainer.state.metrics["first/norm"]


@pytest.mark.parametrize("event", WITHIN)
def test_detached_in_a_handler_that_is_older(event):
    model, optimizer, trainer = make_trainer()
    register_events(trainer)
    handles = []
    trainer.add_event_handler(event, lambda _: [handle.remove() for handle in handles])
    trainer.run(make_batches(1))
    before = footprint(trainer, model, optimizer)
    for _ in range(2):
        handles.append(attach_monitors(trainer, model, optimizer, every=1, rollback={"model": model}))
        trainer.state.max_epochs = None
        trainer.state.iteration = trainer.state.epoch = 0
        trainer.run(make_batches(5))
        assert footprint(trainer, model, optimizer) == before


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (0.25, {"loss/value": 0.25}),
        (3, {"loss/value": 3.0}),
        (torch.tensor(0.5, requires_grad=True), {"loss/value": 0.5}),
        (float("inf"), {"loss/value": float("inf")}),
        ({"kl": -1.5, "a b": torch.tensor(2.0), "y": torch.ones(3), "is": True}, {"loss/kl": -1.5, "loss/a_b": 2.0}),
        ({"self": 1.0}, {"loss/self": 1.0}),
        (None, {}),
        ((1.0, 2.0), {}),
        (torch.full((1, 1), 0.75), {"loss/value": 0.75}),
        ({"large": 10**400, "loss": 1.5}, {"loss/loss": 1.5}),
        (torch.ones(2), {}),
        ("text", {}),
    ],
)  # fmt: skip
def test_the_loss_is_recorded_from_the_first_iteration_on_if_there_is_one(output, expected):
    model, optimizer, _ = make_trainer()
    trainer = Engine(lambda engine, batch: output)
    attach_monitors(trainer, model, optimizer)
    trainer.run([None])
    assert {name: value for name, value in trainer.state.metrics.items() if name.startswith("loss/")} == expected


def test_a_loss_that_another_monitor_publishes_is_left_to_it(parts):
    model, optimizer, trainer = parts
    SpikeMonitor(lambda engine: engine.state.output, prefix="loss").attach(trainer)
    assert "loss" not in attach_monitors(trainer, model, optimizer).monitors
    attach_monitors(trainer, model, optimizer, prefix="2nd")
    assert trainer.state._2nd_unhealthy_spike is False


def test_a_handle_is_saved_and_loaded_as_a_whole(parts, caplog):
    model, optimizer, trainer = parts
    handle = attach_monitors(trainer, model, optimizer, every=2, extra="spectral")
    trainer.run(make_batches(7, spikes=[5]))
    saved = copy.deepcopy(handle.state_dict())
    other = make_trainer()
    fresh = attach_monitors(other[2], *other[:2], every=2)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match="states of"):
        fresh.load_state_dict({"other": {}})
    with pytest.raises(ValueError, match="should be a state of"):
        fresh.load_state_dict({**saved, "moments": {"wrong": 1}})  # the last one
    assert same(fresh.state_dict(), before)
    fresh.load_state_dict(saved)
    assert [message for message in caplog.messages if "differ" in message][-1].endswith("not loaded: spectral")
    assert same(fresh.state_dict(), {name: state for name, state in saved.items() if name != "spectral"})


def test_a_refused_state_leaves_the_reference_as_it_was(parts):
    model, optimizer, trainer = parts
    handle = attach_monitors(trainer, model, optimizer, extra=["rcc", "replicas"])
    weights = [parameter.clone() for parameter in handle.monitors["rcc"].reference.parameters()]
    state = copy.deepcopy(handle.state_dict())
    state["rcc"]["reference"] = {name: value + 1.0 for name, value in state["rcc"]["reference"].items()}
    with pytest.raises(ValueError, match="should be a state of"):
        handle.load_state_dict({**state, "replicas": {"wrong": 1}})
    kept = [torch.equal(*pair) for pair in zip(handle.monitors["rcc"].reference.parameters(), weights, strict=True)]
    assert kept == [True] * len(weights)


def test_a_dropped_run_is_freed_whatever_reaches_the_trainer():
    def run(kind):
        model, optimizer, trainer = make_trainer()
        options = {"on_spike": lambda engine, norm: trainer} if kind == "function" else {}
        if kind == "model":
            model.trainer = trainer
        handle = attach_monitors(trainer, model, optimizer, **options)
        trainer.run(make_batches(3))
        if kind == "removed":
            handle.remove()
        return [weakref.ref(item) for item in (model, optimizer, trainer)]

    run("plain")
    gc.collect()
    gc.disable()
    try:
        assert [ref() for kind in ("plain", "removed") for ref in run(kind)] == [None] * 6
    finally:
        gc.enable()
    references = run("function") + run("model")  # both close a cycle, as they do without monitors
    gc.collect()
    assert [ref() for ref in references] == [None] * 6


def test_rollback_and_records_of_spikes(tmp_path):
    model, optimizer, trainer = make_trainer()
    handle = attach_monitors(
        trainer,
        model,
        optimizer,
        rollback={"model": model, "optimizer": optimizer},
        record_spikes=tmp_path,
        threshold=StaticThreshold(100.0),
        prefix="first",
        loggers=(logger := ListLogger()),
    )
    assert {"rollback", "spike_record"} <= handle.monitors.keys()
    trainer.run(make_batches(3, spikes=[2]))
    assert trainer.state.metrics["first/rollback/count"] == 0
    assert trainer.state.metrics["first/grad_record/recorded_count"] == len(list(tmp_path.iterdir())) == 1
    assert "first/rollback/count" in {name for _, named in logger.written for name in named}


@pytest.mark.parametrize("kind", ["forgotten", "given", "disabled"])
def test_a_forgotten_scaler_is_noticed(caplog, kind):
    model, optimizer, _ = make_trainer()
    scaler = torch.amp.GradScaler("cpu", enabled=kind != "disabled")

    trainer = Engine(make_step(model, optimizer, scaler=scaler))
    attach_monitors(trainer, model, optimizer, every=1, scaler=scaler if kind == "given" else None)
    trainer.run(make_batches(5))
    warned = [message for message in caplog.messages if "GradScaler" in message]
    assert [message.split(":")[0] for message in warned] == (
        ["GradMonitor (grad)", "WeightUpdateHandler (monitor)"] if kind == "forgotten" else []
    )


SETUPS = (Path(__file__).parent.parent / "docs" / "setups.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", re.findall(r"^```python\n(.*?)^```$", SETUPS, re.DOTALL | re.MULTILINE))
def test_every_documented_setup_is_resumed_bitwise(source, tmp_path, monkeypatch):
    """Models, optimizers, schedulers and monitors, and what these publish, are those of the uninterrupted run."""
    random, unsteady = {}, re.compile(r"_ms$|_per_s$|_mb$|share$")

    def run(folder, resumed_from=0):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        published = {}

        def train(trainer, to_save, batches):
            if resumed_from:
                file = tmp_path / "whole" / "checkpoints" / f"checkpoint_{resumed_from}.pt"
                Checkpoint.load_objects(to_save, torch.load(file, weights_only=True))
                restore_rng_state(random[resumed_from])

            @trainer.on(Events.ITERATION_COMPLETED)
            def keep(engine):
                random[engine.state.iteration] = capture_rng_state()
                steady = [name for name in engine.state.metrics if not unsteady.search(name)]
                values = {name: float(engine.state.metrics[name]) for name in steady}
                published[engine.state.iteration] = values

            trainer.run(batches[resumed_from:])

        namespace = {"train": train}
        with contextlib.redirect_stdout(io.StringIO()):
            text = source.replace("    trainer.run(batches)", "    train(trainer, to_save, batches)")
            exec(compile(text, "docs/setups.md", "exec"), namespace)
        return published, {name: item.state_dict() for name, item in namespace["to_save"].items()}

    expected, end = run("whole")
    first = min(int(path.stem.partition("_")[2]) for path in (tmp_path / "whole" / "checkpoints").iterdir())
    published, resumed = run("resumed", first)
    assert [*published] == list(range(first + 1, max(expected) + 1))
    for iteration, values in published.items():
        assert same(values, expected[iteration]), iteration
    for name, state in resumed.items():
        assert same(state, end[name]), name


def test_each_handle_records_the_loss_until_it_is_removed():
    model, optimizer, _ = make_trainer()
    trainer = Engine(lambda engine, batch: {"kl": 3.0 * engine.state.iteration})
    first, second = (attach_monitors(trainer, model, optimizer, prefix=name) for name in ("a", ""))
    trainer.run([None] * 2)
    assert (trainer.state.metrics["a/loss/kl"], trainer.state.metrics["loss/kl"]) == (6.0, 6.0)
    first.remove()
    trainer.state.max_epochs = None
    trainer.run([None] * 3)
    assert (trainer.state.metrics.get("a/loss/kl"), trainer.state.metrics["loss/kl"]) == (None, 9.0)
    second.remove()


class Nested(nn.Module):
    """Modules inside of each other, each with a layer of its own."""

    def __init__(self, depth):
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.a_module_with_a_long_name = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x):
        return self.a_module_with_a_long_name(self.own(x))


def test_modules_nested_60_deep_are_attached_within_a_second():
    model = Nested(60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Engine(make_step(model, optimizer, loss_of=lambda model, x: model(x).square().mean()))
    start = time.process_time()
    attach_monitors(trainer, model, optimizer, loggers=ListLogger(), every=1)
    assert time.process_time() - start < 1.0
    trainer.run([torch.ones(2, 3)])
    innermost = "a_module_with_a_long_name." * 60 + "own"
    assert trainer.state.metrics[f"activation/{innermost}/max_abs"] > 0


@pytest.mark.allows_failed_monitors
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_that_is_scripted_after_attaching_does_not_end_training():
    def train(monitored):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8), nn.GELU()), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = Engine(make_step(model, optimizer))
        if monitored:
            attach_monitors(trainer, model, optimizer, every=1, extra=["rcc", "histograms"])

        @trainer.on(Events.ITERATION_COMPLETED(once=2))
        def script():
            model[1] = torch.jit.script(model[1])

        trainer.run(make_batches(6))
        return [model.state_dict(), optimizer.state_dict()], trainer.state.metrics.get("grad/norm", 0.0)

    (state, norm), (expected, _) = train(True), train(False)
    assert norm > 0
    assert same(state, expected)
