"""Width scaling: learning rates, multipliers and initial weights that keep training the same at any width."""

from ignite_monitor.scaling.alignment import AlignmentHandler
from ignite_monitor.scaling.coordinate_check import coordinate_check
from ignite_monitor.scaling.coordinate_result import CoordinateCheck, Record, Slope
from ignite_monitor.scaling.maxp import MaxPScheduler
from ignite_monitor.scaling.parametrization import Parametrization, ParametrizedLayer
from ignite_monitor.scaling.parametrize import parametrize
from ignite_monitor.scaling.program import TracingError
from ignite_monitor.scaling.solver import (
    ALIGNMENTS,
    PRESETS,
    Alignment,
    InfeasibleError,
    LayerGraph,
    Node,
    Solution,
    solve,
)

__all__ = [
    "ALIGNMENTS",
    "PRESETS",
    "Alignment",
    "AlignmentHandler",
    "CoordinateCheck",
    "InfeasibleError",
    "LayerGraph",
    "MaxPScheduler",
    "Node",
    "Parametrization",
    "ParametrizedLayer",
    "Record",
    "Slope",
    "Solution",
    "TracingError",
    "coordinate_check",
    "parametrize",
    "solve",
]
