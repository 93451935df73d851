"""Make the pictures of the documentation: a training that comes back, the demo's figure, its summary in a terminal,
its report, and a figure for each monitor's page, of one real run.

    python docs/pictures.py [--chromium PROGRAM] [--only figures|pictures|notebooks]

Also runs the notebooks, so that whoever reads them in the repository sees what comes out. Needs
``pip install -e '.[docs,tensorboard]'``, and for the report Chromium or Chrome, run without a window.
Nothing is fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import io
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import ignite.distributed as idist
import matplotlib
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from torch import nn
from torch.nn.functional import mse_loss

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    HDF5Logger,
    OptimizerStateHandler,
    RCCHandler,
    ReplicaCheckHandler,
    RobustThreshold,
    SpectralNormHandler,
    SpikeMonitor,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.report.page import page
from ignite_monitor.report.plot import draw, picture
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise
from ignite_monitor.report.text import findings_text, spikes_text
from ignite_monitor.scaling import AlignmentHandler, coordinate_check, parametrize

HERE = Path(__file__).resolve().parent
demo = SimpleNamespace(**runpy.run_path(HERE.parent / "examples" / "demo.py"))
MOST_BYTES = 150_000
FIGURES = {  # page -> which metrics
    "grad_monitor": "^grad/(norm|threshold|spike)$",
    "spike_monitor": "^loss/(value|threshold|spike)$",
    "weight_update": "^monitor/(update_ratio_|grad_(median|p95|min|max))",
    "optimizer_state": "^optimizer/(rms|momentum_cosine)_",
    "attention_entropy": "^attention_entropy/|^activation/[^/]+/max_abs$",
    "spectral_norm": "^spectral/(norm_max|norm_mean|topk)",
    "rcc": "^rcc/(weight_update|input_drift)/",
    "alignment": "^alignment/(z0_dW|dZ_dW)/",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="chromium", help="the browser's program (default: chromium)")
    parser.add_argument("--only", choices=("figures", "pictures", "notebooks"), help="these alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "figures"):
            make_figures(Path(folder))
        if arguments.only in (None, "pictures"):
            make_pictures(Path(folder), arguments.chromium)
        if arguments.only in (None, "notebooks"):
            make_notebooks(Path(folder))


def make_pictures(directory, browser):
    example = [sys.executable, HERE.parent / "examples" / "comes_back.py", "--plot", directory / "comes_back.png"]
    subprocess.run(example, check=True, cwd=directory)
    keep(directory / "comes_back.png", "comes_back.png")
    subprocess.run([sys.executable, HERE.parent / "examples" / "demo.py"], check=True, cwd=directory)
    run = Run(read_hdf5(directory / "runs" / "demo" / "run.h5"))
    draw(picture(run), directory / "plot.png", "run.h5")
    keep(directory / "plot.png", "plot.png")
    html = page(summarise("run.h5", run), run, "ignite-monitor")
    (directory / "run.html").write_text(html, encoding="utf-8")
    shoot(browser, (directory / "run.html").as_uri(), directory / "report.png", "1280,1400", 1_000)
    keep(directory / "report.png", "report.png")
    draw(picture(run, re.compile("^(grad/(norm|threshold|spike)|train/loss)$")), directory / "rollback.png")
    keep(directory / "rollback.png", "figures/rollback.png")
    findings = findings_text(summarise("runs/demo/run.h5", run))
    draw_terminal("ignite-monitor summary runs/demo/run.h5", findings, "summary.png")
    (snippet,) = re.findall("^```python\n(.*?)^```", (HERE / "monitors/spike_recorder.md").read_text(), re.S | re.M)
    subprocess.run([sys.executable, "-c", snippet], check=True, cwd=directory)
    parts = spikes_text(directory / "spikes")
    draw_terminal("ignite-monitor spike spikes", parts, "figures/spike_recorder.png")


def draw_terminal(command, parts, name):
    """A terminal of 80 columns as a picture."""
    terminal = Console(width=80, file=io.StringIO(), color_system="truecolor", force_terminal=True, highlight=False)
    rows = [*terminal.render_lines(Text(f"$ {command}", "bold")), []]
    rows += [row for part in parts for row in terminal.render_lines(part)]
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = {it: ImageFont.truetype(folder / f"DejaVuSansMono{it}.ttf", 20) for it in ("", "-Bold", "-Oblique")}
    wide, high, margin, theme = fonts[""].getlength("M"), 27, 20, SVG_EXPORT_THEME
    size = round(80 * wide) + 2 * margin, high * len(rows) + 2 * margin
    image = Image.new("RGB", size, tuple(theme.background_color))
    pen = ImageDraw.Draw(image)
    for number, row in enumerate(rows):
        column = 0
        for text, style, _ in row:
            style = style or Style()
            colour = style.color.get_truecolor(theme) if style.color else theme.foreground_color
            colour = tuple(
                (part + ground) // 2 if style.dim else part
                for part, ground in zip(colour, theme.background_color, strict=True)
            )
            font = fonts["-Bold" if style.bold else "-Oblique" if style.italic else ""]
            pen.text((margin + column * wide, margin + number * high), text.rstrip("\n"), fill=colour, font=font)
            column += len(text)
    image.save(HERE / name)
    keep(HERE / name, name)


def make_figures(directory):
    run = Run(read_hdf5(train(directory / "figures.h5")))
    for name, metrics in FIGURES.items():
        draw(picture(run, re.compile(metrics)), directory / f"{name}.png")
        keep(directory / f"{name}.png", f"figures/{name}.png")
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(watch_replicas, directory / "replicas.h5")
    for name, file, metrics in (
        ("noise_scale", watch_noise(directory / "noise.h5"), "^noise_scale/"),
        (
            "curvature",
            watch_curvature(directory / "curvature.h5"),
            "^curvature/(hessian_max_eigenvalue|stability_threshold|along_gradient)$",
        ),
        ("replicas", directory / "replicas.h5", "^replicas/"),
        ("step_stats", watch_time(directory / "time.h5"), "^step/(time_ms|data_wait_ms)$"),
    ):
        draw(picture(Run(read_hdf5(file)), re.compile(metrics)), directory / f"{name}.png")
        keep(directory / f"{name}.png", f"figures/{name}.png")
    torch.manual_seed(0)
    batch = torch.randn(64, 32), torch.randint(10, (64,))
    widths = [32, 64, 128, 256, 512]
    coordinate_check(make_scaled, lambda width: batch, widths, steps=3).plot(directory / "coordinates.png")
    keep(directory / "coordinates.png", "figures/coordinates.png")


def make_notebooks(directory):
    import nbclient
    import nbformat

    for path in sorted((HERE / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, resources={"metadata": {"path": directory}}, record_timing=False).execute()
        notebook.metadata.pop("language_info")  # the version of Python would change with each run
        nbformat.write(notebook, path)
        print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size:,} bytes")


def watch_noise(file, iterations=400):
    """The same training in four micro-batches, of which the noise scale needs at least two."""
    torch.manual_seed(0)
    model, batches = demo.TinyGPT(), demo.make_batches(demo.read_text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine, batch):
        optimizer.zero_grad()
        for micro in zip(*(part.chunk(4) for part in batch), strict=True):
            (demo.loss_of(model, micro) / 4).backward()
        optimizer.step()

    trainer = Engine(train_step)
    monitor = GradientNoiseScaleHandler(model, optimizer, micro_batches=4)
    with HDF5Logger(file) as logger, monitor.attach(trainer):
        monitor.log_to(logger, trainer)
        trainer.run(batches, max_epochs=1, epoch_length=iterations)
    return file


def watch_curvature(file, iterations=1000):
    """Gradient descent with the same items in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.randn(64, 4)
    trainer = create_supervised_trainer(model, optimizer := torch.optim.SGD(model.parameters(), 0.05), mse_loss)
    monitor = CurvatureHandler(model, optimizer, loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]))
    with HDF5Logger(file) as logger, monitor.attach(trainer, Events.ITERATION_STARTED(every=10)):
        monitor.log_to(logger, trainer)
        trainer.run([(x, x[:, :1] * x[:, 1:2])], max_epochs=iterations)
    return file


def watch_time(file, iterations=100):
    """A training that mostly sleeps, so that its times are those of any machine."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load():
        for iteration in range(1, iterations + 1):
            time.sleep(0.2 if 30 <= iteration < 50 else 0.02)
            yield torch.randn(8, 4), torch.randn(8, 1)

    def train_step(engine, batch):
        time.sleep(0.1 if engine.state.iteration < 75 else 0.2)
        optimizer.zero_grad()
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    trainer = Engine(train_step)
    monitor = StepStatsHandler(model, optimizer)
    with HDF5Logger(file) as logger, monitor.attach(trainer):
        monitor.log_to(logger, trainer)
        trainer.run(load(), max_epochs=1, epoch_length=iterations)
    return file


def watch_replicas(rank, file, iterations=200, flipped=120):
    """The same training on two ranks, on one of which a bit flips."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(demo.TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine, batch):
        optimizer.zero_grad()
        demo.loss_of(model, batch).backward()
        optimizer.step()
        if rank and engine.state.iteration == flipped:
            next(model.parameters()).data.view(torch.int32)[3, 5] ^= 1

    trainer = Engine(train_step)
    monitor = ReplicaCheckHandler(model, optimizer)
    monitor.attach(trainer, Events.ITERATION_STARTED(every=10))
    with HDF5Logger(file) as logger:
        monitor.log_to(logger, trainer)
        trainer.run(demo.make_batches(demo.read_text(), seed=rank), max_epochs=1, epoch_length=iterations)


def make_scaled(width):
    def mlp(n):
        return nn.Sequential(nn.Linear(32, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 10))

    parametrization = parametrize(mlp, (16, width), sample_input=torch.zeros(1, 32), lr_prefactor=0.01)
    return parametrization, torch.optim.Adam(parametrization.param_groups)


def train(file, iterations=500, damaged=333):
    """The demo's training, watched by every monitor that has a page."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = demo.TinyGPT(), demo.make_batches(demo.read_text(), damaged)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine, batch):
        optimizer.zero_grad()
        loss = demo.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    always = [
        GradMonitor(model, optimizer, threshold=RobustThreshold(), on_spike="skip"),
        SpikeMonitor(lambda engine: engine.state.output, prefix="loss", flag="loss_is_spike"),
    ]
    now_and_then = [
        WeightUpdateHandler(model, optimizer),
        OptimizerStateHandler(model, optimizer),
        ActivationHandler(model, activations={"max_abs": True}, include="blocks", attention=True),
        SpectralNormHandler(model, updates=True),
        RCCHandler(model),
        AlignmentHandler(model),
    ]
    with HDF5Logger(file) as logger:
        for monitor in [*always, *now_and_then]:
            monitor.attach(trainer, Events.ITERATION_STARTED(every=1 if monitor in always else 5))
            monitor.log_to(logger, trainer)
        trainer.run(batches, max_epochs=1, epoch_length=iterations)
    return file


def shoot(browser, address, output, size, patience_ms):
    command = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", f"--window-size={size}"]
    command += [f"--virtual-time-budget={patience_ms}", f"--screenshot={output}", address]
    subprocess.run([browser, *command], check=True, capture_output=True, timeout=180)


def keep(path, name):
    """A picture in few colours, small enough for a repository."""
    image = Image.open(path).convert("RGB")
    for width, colours in ((1400, 256), (1400, 64), (1100, 64), (900, 32)):
        small = image.resize((width, image.height * width // image.width)) if image.width > width else image
        # A median cut would give up the colours of the few pixels that matter, a spike's cross.
        small.quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE).save(
            HERE / name, optimize=True
        )
        if (HERE / name).stat().st_size < MOST_BYTES:
            break
    print(f"docs/{name}: {(HERE / name).stat().st_size:,} bytes, {small.width} x {small.height}")


if __name__ == "__main__":
    main()
