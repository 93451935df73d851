"""Width scaling: learning rates, multipliers and initial weights that keep training the same at any width."""

from ignite_monitor.scaling.alignment import AlignmentHandler
from ignite_monitor.scaling.coordinate_check import coordinate_check
from ignite_monitor.scaling.coordinate_result import CoordinateCheck, Record, Slope
from ignite_monitor.scaling.maxp import MaxPScheduler
from ignite_monitor.scaling.operations import TracingError
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.parametrize import parametrize

__all__ = [
    "AlignmentHandler",
    "CoordinateCheck",
    "MaxPScheduler",
    "Parametrization",
    "Record",
    "Slope",
    "TracingError",
    "coordinate_check",
    "parametrize",
]
