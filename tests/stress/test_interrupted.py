"""Ctrl-C at any moment, in a function of the package too: no hook is left, and training and measuring go on."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import EMAHandler

import ignite_monitor
from ignite_monitor import MonitorEvents, attach_monitors
from tests._helpers import UNSTEADY, footprint, hooks_only, make_batches, make_trainer, same

EXTRA = ["replicas", "rcc", "histograms", "spectral"]


@contextlib.contextmanager
def interrupted_at_call(number):
    """KeyboardInterrupt, as from Ctrl-C, when that many functions of the package have been entered."""
    package, calls, before = str(Path(ignite_monitor.__file__).parent), itertools.count(1), sys.gettrace()

    def trace(frame, event, _):
        code = frame.f_code
        # In a generator expression it may get lost in what consumes it, Python drops it in a finalizer, and in the end
        # of torch's no_grad it leaves gradients off; none of these is the package's doing.
        lost = code.co_name == "<genexpr>" or frame.f_back.f_code.co_filename.endswith(("grad_mode.py", "weakref.py"))
        if code.co_filename.startswith(package) and not lost and next(calls) == number:
            sys.settrace(before)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


def monitored():
    model, optimizer, trainer = make_trainer()
    handle = attach_monitors(trainer, model, optimizer, on_spike="skip", every=1, extra=EXTRA)
    EMAHandler(model, momentum=0.1).attach(trainer)
    published = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: torch.manual_seed(engine.state.iteration))

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        for monitor in handle.monitors.values():
            monitor.on_host()
        published.append({name: value for name, value in engine.state.metrics.items() if name not in UNSTEADY})

    return trainer, published, lambda: hooks_only(footprint(trainer, model, optimizer))


def test_interrupted_at_any_moment():
    trainer, published, hooks = monitored()
    trainer.run(make_batches(2))
    before = hooks()
    for number in (*range(1, 24), 80, 700, 1500, 3000, 6000):
        trainer.state.max_epochs = None
        with interrupted_at_call(number):
            trainer.run(make_batches(40))
        assert hooks() == before, number
    trainer.state.max_epochs = None
    published.clear()
    trainer.run(make_batches(3))
    assert {name.partition("/")[0] for name in published[-1]} >= {"grad", "monitor", "activation", "rcc", "spectral"}


def test_interrupted_by_ignite_between_events_and_continued():
    """Every iteration publishes what it does in a run that nobody interrupts."""
    trainer, whole, _ = monitored()
    trainer.run(make_batches(10))
    trainer, published, _ = monitored()
    stops = [Events.STARTED, Events.GET_BATCH_STARTED(once=2), MonitorEvents.GRADIENTS_READY(once=3)]
    stops += [Events.GET_BATCH_COMPLETED(once=5), Events.ITERATION_STARTED(once=6), Events.ITERATION_COMPLETED(once=8)]
    for stop in stops:
        trainer.add_event_handler(stop, trainer.interrupt)
    pauses = 0
    while trainer.state.iteration < 10:
        trainer.run(make_batches(10))
        pauses += 1
    assert pauses == len(stops) + 1
    assert same(published, whole)
