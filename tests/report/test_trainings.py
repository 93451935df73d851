"""Small trainings of the benchmark: healthy ones are healthy, and the causes of damaged ones come first."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise

HEALTHY = [
    *(("as it is", "mlp"), ("as it is", "cnn"), ("as it is", "gan"), ("full buffer from the start", "rl")),
    *(("accumulation", "gpt"), ("step decay", "lstm"), ("momentum SGD", "mlp"), ("batch of 2", "mlp")),
]
FAULTY = [
    *(("learning rate × 300", "mlp"), ("learning rate × 300", "gpt"), ("warm-up to a rate × 300", "mlp")),
    *(("learning rate × 1e-5", "mlp"), ("weight decay × 1e4", "mlp"), ("all weights 0", "mlp")),
    *(("zero_grad forgotten", "rl"), ("GradScaler not given", "cnn"), ("step() forgotten", "mlp")),
    *(("every 10th batch bad", "mlp"), ("head × 1e4 between steps", "cnn"), ("queries and keys × 20", "gpt")),
]


@pytest.fixture(scope="module")
def benchmark():
    """The module benchmarks/diagnosis.py."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        import diagnosis

        yield diagnosis
    finally:
        del sys.path[0]


@pytest.mark.parametrize(("name", "training"), HEALTHY + FAULTY)
def test_the_first_finding_names_the_fault(tmp_path, benchmark, name, training):
    variants = [*benchmark.FAULTS, *benchmark.HEALTHY]
    (fault,) = [it for it in variants if it.name == name and training in it.trainings.split()]
    is_right, row = benchmark.diagnose(fault, training, 0, 300, tmp_path / "run.h5")
    assert is_right, row
    summary = summarise("run.h5", Run(read_hdf5(tmp_path / "run.h5")))
    assert summary.healthy is not bool(fault.kinds)


def test_the_module_that_produces_nan_is_named(tmp_path, benchmark):
    """It is the first in the order of execution, in which ``norm_2`` comes after the attention."""
    damage = benchmark.change("blocks.1.norm_2.weight", lambda weight: weight[:1].fill_(math.nan), 50)
    with HDF5Logger(tmp_path / "run.h5") as logger:
        benchmark.train(benchmark.Plan("gpt", each=damage), 0, 60, logger)
    findings = summarise("run.h5", Run(read_hdf5(tmp_path / "run.h5"))).findings
    assert (findings[0].kind, findings[0].onset) == ("nonfinite_forward", 50)
    assert "blocks.1.norm_2" in findings[0].text
    assert [it.severity for it in findings if it.kind == "nonfinite_gradients"] == ["problem"]
