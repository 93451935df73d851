"""Training-health handlers for PyTorch-Ignite."""

from importlib import import_module
from typing import TYPE_CHECKING

# Names are imported on first use: reading a file needs neither torch nor Ignite.
_MODULE_OF = {
    "ActivationHandler": "activation.handler",
    "CurvatureHandler": "curvature.handler",
    "DriftMonitor": "drift.handler",
    "GradMonitor": "gradient.handler",
    "GradientNoiseScaleHandler": "noise_scale.handler",
    "HDF5Logger": "hdf5.logger",
    "HealthyCheckpoint": "healthy_checkpoint.handler",
    "HistogramHandler": "histograms.handler",
    "Key": "schema",
    "MeanStdThreshold": "detection.thresholds",
    "Metric": "activation.metric",
    "Monitor": "monitor.base",
    "MonitorEvents": "events.monitor_events",
    "OptimizerStateHandler": "optimizer_state.handler",
    "ParameterDiagnostics": "weight_update.handler",
    "RCCHandler": "rcc.handler",
    "ReplayCheckHandler": "replay.handler",
    "ReplicaCheckHandler": "replicas.handler",
    "RobustThreshold": "detection.robust",
    "RollbackHandler": "rollback.handler",
    "RoutingHandler": "routing.handler",
    "Schema": "schema",
    "SetupCheck": "setup_check.handler",
    "SpectralNormHandler": "spectral.handler",
    "SpikeMonitor": "spike.handler",
    "SpikeRecord": "spike_recorder.record",
    "SpikeRecorder": "spike_recorder.handler",
    "StaticThreshold": "detection.thresholds",
    "StepStatsHandler": "step_stats.handler",
    "ThresholdRule": "detection.thresholds",
    "WeightUpdateHandler": "weight_update.handler",
    "attach_monitors": "attaching",
    "load_spike": "spike_recorder.record",
    "read_hdf5": "hdf5.reader",
    "record": "activation.record",
    "tensorboard_layout": "tensorboard",
}

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two
    from ignite_monitor.activation.handler import ActivationHandler as ActivationHandler
    from ignite_monitor.activation.metric import Metric as Metric
    from ignite_monitor.activation.record import record as record
    from ignite_monitor.attaching import attach_monitors as attach_monitors
    from ignite_monitor.curvature.handler import CurvatureHandler as CurvatureHandler
    from ignite_monitor.detection.robust import RobustThreshold as RobustThreshold
    from ignite_monitor.detection.thresholds import MeanStdThreshold as MeanStdThreshold
    from ignite_monitor.detection.thresholds import StaticThreshold as StaticThreshold
    from ignite_monitor.detection.thresholds import ThresholdRule as ThresholdRule
    from ignite_monitor.drift.handler import DriftMonitor as DriftMonitor
    from ignite_monitor.events.monitor_events import MonitorEvents as MonitorEvents
    from ignite_monitor.gradient.handler import GradMonitor as GradMonitor
    from ignite_monitor.hdf5.logger import HDF5Logger as HDF5Logger
    from ignite_monitor.hdf5.reader import read_hdf5 as read_hdf5
    from ignite_monitor.healthy_checkpoint.handler import HealthyCheckpoint as HealthyCheckpoint
    from ignite_monitor.histograms.handler import HistogramHandler as HistogramHandler
    from ignite_monitor.monitor.base import Monitor as Monitor
    from ignite_monitor.noise_scale.handler import GradientNoiseScaleHandler as GradientNoiseScaleHandler
    from ignite_monitor.optimizer_state.handler import OptimizerStateHandler as OptimizerStateHandler
    from ignite_monitor.rcc.handler import RCCHandler as RCCHandler
    from ignite_monitor.replay.handler import ReplayCheckHandler as ReplayCheckHandler
    from ignite_monitor.replicas.handler import ReplicaCheckHandler as ReplicaCheckHandler
    from ignite_monitor.rollback.handler import RollbackHandler as RollbackHandler
    from ignite_monitor.routing.handler import RoutingHandler as RoutingHandler
    from ignite_monitor.schema import Key as Key
    from ignite_monitor.schema import Schema as Schema
    from ignite_monitor.setup_check.handler import SetupCheck as SetupCheck
    from ignite_monitor.spectral.handler import SpectralNormHandler as SpectralNormHandler
    from ignite_monitor.spike.handler import SpikeMonitor as SpikeMonitor
    from ignite_monitor.spike_recorder.handler import SpikeRecorder as SpikeRecorder
    from ignite_monitor.spike_recorder.record import SpikeRecord as SpikeRecord
    from ignite_monitor.spike_recorder.record import load_spike as load_spike
    from ignite_monitor.step_stats.handler import StepStatsHandler as StepStatsHandler
    from ignite_monitor.tensorboard import tensorboard_layout as tensorboard_layout
    from ignite_monitor.weight_update.handler import ParameterDiagnostics as ParameterDiagnostics
    from ignite_monitor.weight_update.handler import WeightUpdateHandler as WeightUpdateHandler
else:
    __all__ = list(_MODULE_OF)

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
