"""A comparison that keeps what it is given."""

from __future__ import annotations

import torch

from ignite_monitor.model.names import modules_by_name
from ignite_monitor.reference.passes import Comparison, Pause, ReferencePasses
from ignite_monitor.reference.reference import Reference


class Recorder(Comparison):
    """Keeps pairs of outputs by name, and what was entered."""

    def __init__(self) -> None:
        self.entered = []
        self.clear()

    def clear(self):
        self.pairs = {}

    def keep(self, call):
        return [call.output if isinstance(call.output, torch.Tensor) else call.output[0], None]

    def enter(self, call):
        self.entered.append(call.name)

    def leave(self, call):
        output = call.output if isinstance(call.output, torch.Tensor) else call.output[0]
        assert call.kept[1] is None
        self.pairs.setdefault(call.name, []).append((output.detach().clone(), call.kept[0].clone()))

    @property
    def complete(self):
        return {name: pairs for name, pairs in self.pairs.items() if name not in self.incomplete}

    def differences(self):
        return {
            name: [float((actual - expected).abs().max()) for actual, expected in pairs]
            for name, pairs in self.complete.items()
        }


class Reporter:
    """Has the texts of reports."""

    def __init__(self):
        self.texts = []

    def report(self, kind, text, once=True):
        self.texts.append(text)


def watch(model, reference="init", pause=None):
    recorder, reporter = Recorder(), Reporter()
    reference = Reference(model, reference)
    passes = ReferencePasses(
        reference, modules_by_name(model), recorder, reporter.report, Pause() if pause is None else pause
    )
    recorder.incomplete, recorder.reporter = passes.incomplete, reporter  # to which the passes hold a weak reference
    return passes, recorder, reporter.texts
