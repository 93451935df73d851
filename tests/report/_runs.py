"""Series with known answers, as a run's file gives them."""

from __future__ import annotations

import numpy as np

from ignite_monitor.keys import ACTIVATION, SCHEMAS
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import diagnose, summarise

SIGNS = {"grad": ("spike", "norm"), "spike": ("spike", "value"), "rollback": ("count", "discarded_count")}


class Recording(dict):
    """Series by name, as a file holds them; monitors have their default prefix, or the keys of SIGNS."""

    def iterations(self, name):
        return np.asarray(self[name][0])

    def monitor(self, name):
        for schema in SCHEMAS:
            for place in [0, *(at + 1 for at, letter in enumerate(name) if letter == "/")]:
                root, key = name[:place].rstrip("/"), name[place:]
                if schema is ACTIVATION:
                    known = key.partition("/")[0] in {item.pattern.partition("/")[0] for item in schema.keys}
                else:
                    known = f"/{root}".endswith(f"/{schema.prefix}")
                known |= all(f"{root}/{sign}" in self for sign in SIGNS.get(schema.kind, ("",)))
                if known and schema.find(key):
                    return schema.kind, root
        return "user", ""


def make_run(series):
    return Run(Recording({name: (np.asarray(at), np.asarray(values, float)) for name, (at, values) in series.items()}))


def summary(series):
    return summarise("run.h5", make_run(series))


def found(series, *kinds):
    """The findings of some kinds, or all but that there is no GradMonitor."""
    every, _ = diagnose(make_run(series))
    return [finding for finding in every if (finding.kind in kinds if kinds else finding.kind != "not_monitored")]


def only(series, *kinds):
    findings = found(series, *kinds)
    assert len(findings) == 1, findings
    return findings[0]


def series(values, every=1):
    """(steps, values): one value every so many iterations."""
    values = np.asarray(values, dtype=np.float64)
    return every * np.arange(1, len(values) + 1), values


def noise(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count)


def grad(norms, spikes=(), thresholds=6.0, skipped=True, root="grad", every=1, made=None):
    """Values of GradMonitor; ``spikes`` and ``made`` are places in ``norms`` counted from 1."""
    norms = np.asarray(norms, dtype=np.float64)
    flags = np.isin(np.arange(1, len(norms) + 1), list(spikes)) * 1.0
    counts = flags.cumsum()
    run = {
        f"{root}/norm": series(norms, every),
        f"{root}/threshold": series(np.broadcast_to(thresholds, norms.shape), every),
        f"{root}/spike": series(flags, every),
        f"{root}/spike_count": series(counts, every),
        f"{root}/skipped_count": series(counts * skipped, every),
        f"{root}/nonfinite_count": series((~np.isfinite(norms)).cumsum(), every),
    }
    if made is not None:
        run[f"{root}/stepped"] = series(np.isin(np.arange(1, len(norms) + 1), list(made)), every)
    return run


def calm_norms(count=200):
    return 1 + 3 * np.exp(-np.arange(count) / 20) + 0.1 * np.abs(noise(count, 0))


def with_spike(at, size=60.0, count=200):
    norms = calm_norms(count)
    norms[np.asarray(at) - 1] = size
    return norms


def weights(count=40, every=5, frozen=0, median=1e-3, spread=10.0, root="monitor"):
    """Values of WeightUpdateHandler; ``frozen`` is frozen_count, a number or one for every iteration."""
    factors = {"median": 1.0, "p95": spread / 3, "max": spread, "min": 1 / spread}
    ratios = np.broadcast_to(median, (count,)) * np.exp(0.1 * noise(count))
    run = {f"{root}/update_ratio_{which}": series(ratios * factor, every) for which, factor in factors.items()}
    run |= {f"{root}/grad_{which}": series(ratios * factor, every) for which, factor in factors.items()}
    for name, values in (("frozen", frozen), ("vanishing", 0), ("exploding", 0)):
        run[f"{root}/{name}_count"] = series(np.broadcast_to(values, (count,)), every)
    return run


def with_dead_units(count=40):
    """A layer whose units die in the middle of the run."""
    return {"activation/a/dead_fraction": series(np.where(np.arange(count) < count // 2, 0.1, 0.95), 5)}


def healthy(count=200):
    """A run of every monitor, in which nothing went wrong."""
    monitored = count // 5
    run = grad(calm_norms(count)) | weights(monitored)
    run["train/loss"] = series(1 + 3 * np.exp(-np.arange(count) / 50) + 0.1 * noise(count))
    run["val/accuracy"] = series(np.linspace(0.2, 0.8, 5), count // 5)
    for layer in range(3):
        name = f"blocks.{layer}.mlp"
        run[f"activation/{name}/dead_fraction"] = series(0.2 + 0.05 * noise(monitored), 5)
        run[f"activation/{name}/nonfinite_count"] = series(np.zeros(monitored), 5)
        run[f"activation/{name}/l2_norm"] = series(5 + 0.1 * noise(monitored), 5)
        run[f"attention_entropy/blocks.{layer}.attn/head_0"] = series(2.5 + 0.1 * noise(monitored), 5)
        run[f"rcc/weight_update/{name}"] = series(np.linspace(0, 2, monitored), 5)
        run[f"rcc/input_drift/{name}"] = series(np.linspace(0, 3, monitored), 5)
    run["spectral/norm_max"] = series(np.linspace(2, 6, monitored), 5)
    run["step/time_ms"] = series(12 + noise(count))
    return run
