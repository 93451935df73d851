"""Tables of the keys that monitors publish, made from their schemas."""

import re

from ignite_monitor import keys

PAGES = {
    "GRADIENT": ("GradMonitor", "grad_monitor"),
    "LOSS": ("LossRecorder", "loss"),
    "SPIKE": ("SpikeMonitor", "spike_monitor"),
    "DRIFT": ("DriftMonitor", "drift"),
    "SPIKE_RECORD": ("SpikeRecorder", "spike_recorder"),
    "ROLLBACK": ("RollbackHandler", "rollback"),
    "WEIGHT_UPDATE": ("WeightUpdateHandler", "weight_update"),
    "OPTIMIZER_STATE": ("OptimizerStateHandler", "optimizer_state"),
    "ACTIVATION": ("ActivationHandler", "activation"),
    "HISTOGRAMS": ("HistogramHandler", "histograms"),
    "ROUTING": ("RoutingHandler", "routing"),
    "STEP_STATS": ("StepStatsHandler", "step_stats"),
    "REPLICAS": ("ReplicaCheckHandler", "replica_check"),
    "REPLAY": ("ReplayCheckHandler", "replay_check"),
    "RCC": ("RCCHandler", "rcc"),
    "SPECTRAL": ("SpectralNormHandler", "spectral_norm"),
    "CURVATURE": ("CurvatureHandler", "curvature"),
    "NOISE_SCALE": ("GradientNoiseScaleHandler", "noise_scale"),
    "ALIGNMENT": ("AlignmentHandler", "alignment"),
    "MAXP": ("MaxPScheduler", "alignment"),
}
"""Name of a schema -> its monitor, and the monitor's page."""

RANGES = (
    (r"[_/]count$|_rank$|iteration$", "0, 1, 2, …"),
    (r"fraction$|share(/|$)|/load_entropy/|/culprit/|epsilon_dominated", "0 to 1"),
    (r"cosine", "−1 to 1"),
    (r"stable_rank|^noise_scale/batch$|/max_over_rms$", "≥ 1"),
    (
        r"^loss/|^alignment/|^maxp/c/|^routing/(logit_max|margin)/|^spike/(value|(lower_)?threshold)$|^recorded/|attention_logit|/\{metric\}$",
        "any number",
    ),
    (r"^curvature/(along|hessian_max_eigenvalue$)", "any number"),
    (r"norm|^grad/|^monitor/|ratio|rms|_ms$|_mb$|_per_s$|/lr/|error|condition|max_abs|entropy", "≥ 0"),
    (r"^rcc/|^drift/sum|^noise_scale/|stability_threshold|/topk/|spectral_scale|_residual$", "≥ 0"),
)
"""Patterns of names, and the range of the values; the first that matches counts."""


def value_range(name, key):
    """Return the range of a key's values in words."""
    if key.meaning.startswith("1 if "):
        return "0 or 1"
    for pattern, words in RANGES:
        if re.search(pattern, name):
            return words + {"": "", "inf": ", ∞", "any": ", ∞, NaN"}[key.nonfinite]
    raise LookupError(f"docs/_ext/metrics.py has no range for {name}")


def without_roles(text):
    """Convert the roles of reStructuredText to Markdown."""
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", re.sub(r":math:`([^`]+)`", r"$\1$", text))


def table(name):
    """Return the keys of a schema of ``ignite_monitor.keys``, their units, ranges and meanings as a table."""
    schema = getattr(keys, name)
    lines = ["| key | unit | range | meaning |", "|---|---|---|---|"]
    for key in schema.keys:
        key_name = f"{schema.prefix}/{key.pattern}".lstrip("/")
        meaning = without_roles(key.meaning + (f"; {key.when}" if key.when else "")).replace("|", r"\|")
        lines.append(f"| `{key_name}` | {key.unit} | {value_range(key_name, key)} | {meaning} |")
    return lines


def reference():
    """Return the tables of all schemas, each below the name of its monitor."""
    lines = []
    for name, (monitor, page) in PAGES.items():
        lines += [f"## {monitor}", "", f"[About this monitor](monitors/{page}.md)", "", *table(name), ""]
    return lines[:-1]
