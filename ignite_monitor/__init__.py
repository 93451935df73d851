"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.events import MonitorEvents
from ignite_monitor.functional.robust import RobustThreshold
from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.handlers.grad_monitor import GradMonitor
from ignite_monitor.handlers.rcc import RCCHandler
from ignite_monitor.handlers.weight_update import ParameterDiagnostics, WeightUpdateHandler

__all__ = [
    "GradMonitor",
    "MeanStdThreshold",
    "MonitorEvents",
    "ParameterDiagnostics",
    "RCCHandler",
    "RobustThreshold",
    "StaticThreshold",
    "ThresholdRule",
    "WeightUpdateHandler",
]
