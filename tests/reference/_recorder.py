"""A comparison that keeps what it is given."""

from __future__ import annotations

from ignite_monitor.model.names import named_modules
from ignite_monitor.reference.passes import Comparison, ReferencePasses
from ignite_monitor.reference.reference import Reference


class Recorder(Comparison):
    """Keeps pairs of inputs by name, and what was called."""

    def __init__(self) -> None:
        self.entered = []
        self.clear()

    def clear(self):
        self.pairs = {}

    def keep(self, call):
        return call.args[0] if call.args else call.kwargs["input"]

    def compare(self, call, kept):
        self.entered.append(call.name)
        self.pairs.setdefault(call.name, []).append((self.keep(call).detach().clone(), kept.clone()))

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


def watch(model, reference="init"):
    recorder, reporter = Recorder(), Reporter()
    reference = Reference(model, reference)
    passes = ReferencePasses(reference, dict(named_modules(model)), recorder, reporter.report)
    recorder.incomplete, recorder.reporter = passes.incomplete, reporter  # to which the passes hold a weak reference
    return passes, recorder, reporter.texts
