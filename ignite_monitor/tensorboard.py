"""Charts for TensorBoard's Custom Scalars tab: what belongs together in one chart."""

from __future__ import annotations

import re

from ignite_monitor.activation.handler import ActivationHandler
from ignite_monitor.checks import check_type
from ignite_monitor.gradient.handler import GradMonitor
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.spectral.handler import SpectralNormHandler
from ignite_monitor.weight_update.handler import WeightUpdateHandler

Layout = dict[str, dict[str, list[str | list[str]]]]

CHARTS: dict[type[Monitor], dict[str, str]] = {
    GradMonitor: {
        "norm against its threshold": "norm|threshold",
        "spikes, skipped steps, non-finite norms so far": "spike_count|skipped_count|nonfinite_count",
    },
    WeightUpdateHandler: {
        "update ratio over the parameters": r"update_ratio_\w+",
        "gradient norm over the parameters": r"grad_\w+",
        "frozen, vanishing, exploding": r"\w+_count",
        "largest gradient norms": "topk_grad/.+",
        "monitored steps without a move": "topk_frozen/.+",
    },
    ActivationHandler: {
        "attention entropy per head": r"attention_entropy/.+/head_\d+",
        "dead units": "activation/.+/dead_fraction",
        "largest activations": "activation/.+/max_abs",
    },
    RCCHandler: {
        "weight update against input drift": r"(weight_update|input_drift)_\w+",
        "share of the weights": "weight_share/.+",
    },
    SpectralNormHandler: {
        "spectral norm over the weights": "norm_(max|mean)|update_norm_max",
        "largest spectral norms": "topk/.+",
    },
}
"""For each kind of monitor, chart -> a regular expression for the names, without the prefix, that are in it."""


def tensorboard_layout(*monitors: Monitor) -> Layout:
    """A layout for TensorBoard's Custom Scalars tab: a norm with its threshold in one chart, and the like.

    TensorBoard keeps one layout per run, so it is handed to the writer and not written behind one's back: charts of
    your own can be added to it before. The charts find the values whatever ``tag`` they are logged with.

    Args:
        monitors: the monitors whose values are logged; those that have no charts of their own are passed over.

    Returns:
        category -> chart -> what is in it, as ``SummaryWriter.add_custom_scalars`` takes it.

    Raises:
        TypeError: if one of them is no monitor.

    Examples:
        .. code-block:: python

            logger = TensorboardLogger(log_dir="runs/first")
            monitor.log_to(logger, trainer)
            logger.add_custom_scalars(tensorboard_layout(monitor))
    """
    layout: Layout = {}
    for monitor in monitors:
        check_type("monitors", monitor, Monitor, "ignite_monitor monitors")
        charts = next((CHARTS[kind] for kind in type(monitor).__mro__ if kind in CHARTS), {})
        # TensorBoard matches from a tag's beginning, so that only the end has to be marked.
        start = f"(.*/)?{re.escape(monitor.prefix)}/" if monitor.prefix else "(.*/)?"
        if charts:
            layout[monitor.prefix or type(monitor).__name__] = {
                title: ["Multiline", [f"{start}({names})$"]] for title, names in charts.items()
            }
    return layout
