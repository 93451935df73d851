"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.events import MonitorEvents
from ignite_monitor.functional.robust import RobustThreshold
from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.handlers.grad_monitor import GradMonitor
from ignite_monitor.handlers.spectral_norm import SpectralNormHandler
from ignite_monitor.handlers.step_stats import StepStatsHandler
from ignite_monitor.handlers.weight_update import ParameterDiagnostics, WeightUpdateHandler

__all__ = [
    "GradMonitor",
    "MeanStdThreshold",
    "MonitorEvents",
    "ParameterDiagnostics",
    "RobustThreshold",
    "SpectralNormHandler",
    "StaticThreshold",
    "StepStatsHandler",
    "ThresholdRule",
    "WeightUpdateHandler",
]
