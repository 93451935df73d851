"""Charts for TensorBoard's Custom Scalars tab."""

from __future__ import annotations

import re

from ignite_monitor.checks import check_type
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.handle import MonitorHandle

Layout = dict[str, dict[str, list[str | list[str]]]]


def tensorboard_layout(*monitors: Monitor | MonitorHandle) -> Layout:
    """Return a layout for TensorBoard's Custom Scalars tab, with related values in one chart.

    TensorBoard keeps one layout per run; add charts of your own before you pass it to the writer. The charts match
    the values under any ``tag``.

    Args:
        monitors: monitors, what their ``attach`` returned, or what ``attach_monitors`` returned.

    Returns:
        category -> chart -> its values, as ``SummaryWriter.add_custom_scalars`` takes it.

    Raises:
        TypeError: if an argument is no monitor.

    Examples:
        .. code-block:: python

            logger = TensorboardLogger(log_dir="runs/first")
            handle = attach_monitors(trainer, model, optimizer, loggers=logger)
            logger.add_custom_scalars(tensorboard_layout(handle))
    """
    members: list[Monitor] = []
    for given in monitors:
        members += given.monitors.values() if isinstance(given, MonitorHandle) else [given]
    layout: Layout = {}
    for monitor in members:
        check_type("monitors", monitor, Monitor, "ignite_monitor monitors")
        charts = monitor.schema.charts()
        # TensorBoard matches from the beginning of a tag; only the end needs a mark.
        start = f"(.*/)?{re.escape(monitor.prefix)}/" if monitor.prefix else "(.*/)?"
        if charts:
            layout[monitor.prefix or type(monitor).__name__] = {
                title: ["Multiline", [f"{start}({names})$"]] for title, names in charts.items()
            }
    return layout
