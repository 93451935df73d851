"""Charts for TensorBoard's Custom Scalars tab: what belongs together in one chart."""

from __future__ import annotations

import re

from ignite_monitor.checks import check_type
from ignite_monitor.monitor.base import Monitor

Layout = dict[str, dict[str, list[str | list[str]]]]


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
        charts = monitor.schema.charts()
        # TensorBoard matches from a tag's beginning, so that only the end has to be marked.
        start = f"(.*/)?{re.escape(monitor.prefix)}/" if monitor.prefix else "(.*/)?"
        if charts:
            layout[monitor.prefix or type(monitor).__name__] = {
                title: ["Multiline", [f"{start}({names})$"]] for title, names in charts.items()
            }
    return layout
