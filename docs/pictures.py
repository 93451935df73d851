"""Make the README's pictures: of the demo's figure, its summary in a terminal, and its charts in TensorBoard.

    python docs/pictures.py [--chromium PROGRAM]

Needs ``pip install -e '.[cli,tensorboard]'`` and Chromium or Chrome, which it runs without a window. TensorBoard has to
be one that runs here; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console

from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.report.panels import picture
from ignite_monitor.report.plot import draw
from ignite_monitor.report.series import tidy
from ignite_monitor.report.summary import summarise
from ignite_monitor.report.text import findings_text

HERE = Path(__file__).resolve().parent
MOST_BYTES = 150_000
SHOWN = "loss|grad/(norm|thresh|spike$)|update_ratio|topk_grad|activation/[^/]+/dead|entropy|rcc/(weight_u|input_d)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="chromium", help="the browser's program (default: chromium)")
    browser = parser.parse_args().chromium
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        subprocess.run([sys.executable, "-m", "ignite_monitor", "demo", "-o", directory / "runs" / "demo"], check=True)
        file = directory / "runs" / "demo" / "run.h5"
        run = tidy(read_hdf5(file))
        draw(picture(run, re.compile(SHOWN)), directory / "plot.png", "run.h5")
        keep(directory / "plot.png", "plot.png")
        terminal = Console(record=True, width=110, file=io.StringIO())
        for part in findings_text(summarise("runs/demo/run.h5", run)):
            terminal.print(part)
        terminal.save_svg(str(directory / "summary.svg"), title="ignite-monitor summary runs/demo/run.h5")
        shoot(browser, f"file://{directory}/summary.svg", directory / "summary.png", "1400,700", 2000)
        keep(directory / "summary.png", "summary.png", crop=True)
        with tensorboard(directory, "runs/demo/tensorboard") as address:
            shoot(browser, f"{address}/#custom_scalars", directory / "charts.png", "1400,760", 25_000)
        keep(directory / "charts.png", "tensorboard.png")


def shoot(browser, address, output, size, patience_ms):
    command = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", f"--window-size={size}"]
    command += [f"--virtual-time-budget={patience_ms}", f"--screenshot={output}", address]
    subprocess.run([browser, *command], check=True, capture_output=True, timeout=180)


@contextmanager
def tensorboard(directory, runs):
    with tempfile.TemporaryFile("w+") as log:
        command = ["-m", "tensorboard.main", "--logdir", runs, "--port", "0", "--load_fast=false"]
        process = subprocess.Popen([sys.executable, *command], cwd=directory, stdout=log, stderr=log)
        try:
            for _ in range(300):
                log.seek(0)
                if found := re.search(r"http://[\w.]+:\d+", log.read()):
                    time.sleep(8)  # until the run has been read
                    yield found[0]
                    return
                time.sleep(0.2)
            raise TimeoutError("TensorBoard did not start")
        finally:
            process.terminate()
            process.wait()


def keep(path, name, crop=False):
    """A picture in few colours, small enough for a repository."""
    image = Image.open(path).convert("RGB")
    if crop:
        blank = Image.new("RGB", image.size, image.getpixel((0, 0)))
        image = image.crop(ImageChops.difference(image, blank).getbbox())
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
