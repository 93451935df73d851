"""A comparison that keeps what it is given."""

from __future__ import annotations

import torch

from ignite_monitor.model.names import modules_by_name
from ignite_monitor.reference.passes import Comparison, ReferencePasses
from ignite_monitor.reference.reference import Reference


class Recorder(Comparison):
    """Keeps outputs, and hands pairs of them on."""

    def __init__(self, by_weights=True) -> None:
        self.by_weights = by_weights
        self.passes = []
        self.entered = []

    def keep(self, call):
        return [call.output if isinstance(call.output, torch.Tensor) else call.output[0], None]

    def enter(self, call):
        self.entered.append(call.name)
        return len(call.args)

    def leave(self, call):
        output = call.output if isinstance(call.output, torch.Tensor) else call.output[0]
        assert call.kept[1] is None
        return output.detach().clone(), call.kept[0].clone(), call.entered

    def passed(self, results):
        self.passes.append(results)

    def differences(self, i=-1):
        return {
            name: [float((actual - expected).abs().max()) for actual, expected, _ in pairs]
            for name, pairs in self.passes[i].items()
        }


def watch(model, reference="init", pauses=()):
    recorder, warnings = Recorder(), []
    passes = ReferencePasses(
        Reference(model, reference), modules_by_name(model), recorder, warnings.append, set(), pauses
    )
    return passes, recorder, warnings
