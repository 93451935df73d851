"""Width scaling: learning rates, multipliers and initial weights that keep training the same at any width."""

from ignite_monitor.scaling.alignment_handler import AlignmentHandler
from ignite_monitor.scaling.coordinate_check import coordinate_check
from ignite_monitor.scaling.coordinate_result import CoordinateCheck, Record, Slope
from ignite_monitor.scaling.graph import ALIGNMENTS, PRESETS, Alignment, LayerGraph, Node, chain
from ignite_monitor.scaling.labels import TracingError
from ignite_monitor.scaling.layers import ParametrizedLayer
from ignite_monitor.scaling.maxp import MaxPScheduler
from ignite_monitor.scaling.module import ParametrizedModule
from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import InfeasibleError, Solution, solve
from ignite_monitor.scaling.widths import parametrize

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
    "ParametrizedModule",
    "Record",
    "Slope",
    "Solution",
    "TracingError",
    "chain",
    "coordinate_check",
    "parametrize",
    "solve",
]
