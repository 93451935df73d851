"""What the README shows is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import create_supervised_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ignite_monitor
from ignite_monitor import MonitorEvents
from ignite_monitor.keys import GRADIENT

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def scalars(log_dir):
    events = EventAccumulator(str(log_dir))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_first_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block, printed, metrics in zip(
        BLOCKS, ["1\n", "1\n", ""], [{"grad/spike_count"}, {"grad/skipped_count"}, set()], strict=False
    ):
        exec(compile(block, "README.md", "exec"), namespace)
        assert capsys.readouterr().out == printed
        assert all(namespace["trainer"].state.metrics[name] == 1 for name in metrics)
    assert scalars(tmp_path / "runs" / "first")["grad/spike"][61] == 1.0
    written = scalars(tmp_path / "runs" / "second")
    assert {"grad/norm", "monitor/update_ratio_median", "activation/_root_/std"} <= written.keys()
    assert list(written["activation/_root_/std"]) == [100]


def test_nothing_is_left_to_be_filled_in():
    assert re.findall(r"^[A-Z_]+$", README, flags=re.MULTILINE) == []


def test_other_examples_run_on_a_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for block in BLOCKS[3:]:
        trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
        monitor = ignite_monitor.GradMonitor(
            model, threshold=ignite_monitor.StaticThreshold(1e-6), prefix="x", flag="y"
        )
        monitor.attach(trainer)
        public = {name: getattr(ignite_monitor, name) for name in ignite_monitor.__all__}
        namespace = public | {
            "trainer": trainer,
            "monitor": monitor,
            "model": model,
            "optimizer": optimizer,
            "torch": torch,
        }
        exec(compile(block, "README.md", "exec"), namespace)
        trainer.run([(torch.randn(4, 3), torch.randn(4, 1))] * 2)
        if "logger" in namespace:
            namespace["logger"].close()
    assert (tmp_path / "spike_1.pt").exists()


def test_width_scaling_example(capsys):
    (block,) = [block for block in BLOCKS if "widths=(32, 512)" in block]
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "{'0': 0.5, '2': 1.0, '4': 0.5}\n"


def test_coordinate_check_and_maxp_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (check,) = [block for block in BLOCKS if "coordinate_check(" in block]
    exec(compile(check, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["0", "2", "4"]
    assert (tmp_path / "coordinates.png").exists()
    (block,) = [block for block in BLOCKS if "MaxPScheduler(" in block]
    namespace = {}
    exec(compile(block, "README.md", "exec"), namespace)
    published = set(namespace["trainer"].state.metrics)
    assert published == {
        "maxp/failed_count",
        *(f"maxp/c/{layer}" for layer in "024"),
        *(f"maxp/lr/{layer}{end}" for layer in "024" for end in ("", ".bias")),
        *(f"alignment/{term}/{layer}" for term in ("z0_dW", "dZ_w0", "dZ_dW") for layer in "24"),
        *(f"alignment/{t}_{s}" for t in ("z0_dW", "dZ_w0", "dZ_dW") for s in ("mean", "min", "max")),
    }


def test_tables_name_what_there_is():
    keys = set(re.findall(r"`(grad/\w+)`", README))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    ignite_monitor.GradMonitor(model, optimizer).attach(trainer)
    trainer.run([(torch.randn(4, 3), torch.randn(4, 1))] * 30)
    assert set(trainer.state.metrics) <= keys <= {f"grad/{key.pattern}" for key in GRADIENT.keys}
    assert {event.name for event in MonitorEvents} <= set(re.findall(r"`([A-Z_]+)`", README))
    assert set(ignite_monitor.__all__) <= set(re.findall(r"\w+", README))


def run_example(name, directory, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )


def accuracies(output):
    return [float(each) for each in re.findall(r"test accuracy ([\d.]+)", output)]


@pytest.mark.parametrize(("arguments", "harmless"), [((), True), (("--ignore-spikes",), False)])
def test_custom_step_example(tmp_path, arguments, harmless):
    done = run_example("spikes_custom_step.py", tmp_path, *arguments)
    output = done.stdout + done.stderr
    assert "iteration 120: spike, gradient norm" in output
    assert "tensorboard --logdir runs/spikes_custom_step" in output
    assert (accuracies(output)[-1] > 0.9) is harmless
    run = "spike_left_out" if harmless else "spike_ignored"
    written = scalars(tmp_path / "runs" / "spikes_custom_step" / run)
    assert written["grad/spike"][120] == 1.0
    assert written["grad/norm"][120] > 100 * written["grad/threshold"][120]
    assert len(written["grad/norm"]) == 220
    assert min(written["grad/threshold"]) == 21


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
@pytest.mark.parametrize(("arguments", "norm", "update"), [((), 3.1, 0.024), (("--muon-lr", "0.2"), 27, 0.24)])
def test_muon_example(tmp_path, arguments, norm, update):
    output = run_example("spectral_muon.py", tmp_path, *arguments).stdout
    norms, updates = zip(*re.findall(r"muon +largest norm +([\d.]+), of an update ([\d.]+)", output), strict=True)
    assert float(norms[-1]) == pytest.approx(norm, rel=0.1)
    assert all(float(each) == pytest.approx(update, rel=0.05) for each in updates)
    assert (accuracies(output)[-1] > 0.93) is (not arguments)


@pytest.mark.parametrize(("arguments", "skipped"), [((), 6), (("--no-skip",), 0)])
def test_skipped_example(tmp_path, arguments, skipped):
    output = run_example("spikes_skipped.py", tmp_path, *arguments).stdout
    assert f"Steps skipped: {skipped} of 220" in output
    assert (accuracies(output)[-1] > 0.9) is bool(skipped)


def test_activations_example(tmp_path):
    output = run_example("activations_gpt.py", tmp_path, "--iterations", "50").stdout
    assert "iteration 50: loss" in output
    written = scalars(tmp_path / "runs" / "activations_gpt")
    assert {f"attention_entropy/blocks.2.attention/head_{i}" for i in range(4)} <= set(written)
    dead = [written[f"activation/blocks.{i}.mlp.1/dead_fraction"][50] for i in range(3)]
    assert dead[1] > max(dead[0], dead[2])


def test_learning_rate_example(tmp_path):
    """Shorter than it is meant to be: the narrow model's best rate is too large for the wide one, but under muP."""
    output = run_example("learning_rate_transfer.py", tmp_path, "--steps", "30", "--seeds", "1").stdout
    found = re.findall(r"(muP|standard) +width +(64|512) +best learning rate 2\^(-\d+)", output)
    best = {(kind, width): int(power) for kind, width, power in found}
    assert len(best) == 4
    assert best["standard", "512"] < best["standard", "64"]
    assert abs(best["muP", "512"] - best["muP", "64"]) <= 2
    assert (tmp_path / "learning_rate_transfer.png").read_bytes().startswith(b"\x89PNG")


def test_width_sweep_example(tmp_path):
    arguments = ("--widths", "64", "128", "256", "512", "--steps", "6", "--output", "sweep.png")
    output = run_example("rcc_width_sweep.py", tmp_path, *arguments).stdout
    slopes = [float(each) for each in re.findall(r"width\^([+-][\d.]+) after one step", output)]
    assert len(slopes) == 8
    hidden, last = slopes[5:7], slopes[7]
    assert max(map(abs, hidden)) < 0.2
    assert 0.3 < last < 1.2
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
