"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.events import MonitorEvents
from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.handlers.grad_monitor import GradMonitor

__all__ = ["GradMonitor", "MeanStdThreshold", "MonitorEvents", "StaticThreshold", "ThresholdRule"]
