"""ignite-monitor: inspect a run on the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ignite_monitor.checks import check_pattern
from ignite_monitor.hdf5.layout import printable, with_version
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.report.finding import plural
from ignite_monitor.report.plot import draw, picture
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import Comparison, Summary, compare, summarise

PROGRAM = "ignite-monitor"
FAILED = 3  # exit code if a rule failed


class BadInput(Exception):  # noqa: N818
    """Unusable input; the text is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 if the input is bad, with one line on the standard error, or FAILED."""
    chosen = _parser().parse_args(arguments)
    try:
        code = chosen.command(chosen) or 0
        sys.stdout.flush()
    except BadInput as error:
        return _end(str(error))
    except ImportError as error:
        return _end(str(error) if "pip install" in str(error) else f"{error}: pip install 'ignite-monitor[cli]'")
    except OSError as error:  # of the output: nothing may be flushed again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_closed = isinstance(error, BrokenPipeError)  # by the reader
        return 0 if is_closed else _end(f"the output: {error.strerror}")
    return code


def _end(error: str) -> int:
    print(f"{PROGRAM}: error: {printable(error)}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="See what happened in a training run.")
    parser.add_argument("--version", action="version", version=with_version(PROGRAM))
    parser.set_defaults(command=lambda chosen: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], int | None], does: str, *runs: str) -> Any:
        added = commands.add_parser(command.__name__[1:], help=does, description=does)
        added.set_defaults(command=command)
        for run in runs:
            added.add_argument(run, metavar=f"{run.upper()}.h5", help="a run's file, as HDF5Logger writes it")
        return added.add_argument

    option = add(_plot, "draw a run and its spikes and reports", "run")
    option("-o", "--output", metavar="FILE", help="a .png, .pdf or .svg (default: RUN.png next to RUN.h5)")
    option("--metrics", metavar="REGEX", help="only metrics whose name matches somewhere")
    option("--dark", action="store_true", help="a dark background")
    option("--all", action="store_true", help="every panel, and not only the eight that matter most")

    option = add(_report, "write a page: findings, evidence, metrics", "run")
    option("-o", "--output", metavar="FILE", help="where to write (default: RUN.html next to RUN.h5)")

    of_one = add(_summary, "what happened in a run, causes before consequences", "run")
    of_two = add(_compare, "two runs side by side, what differs most first", "a", "b")
    for option in (of_one, of_two):
        option("--all", action="store_true", help="every metric in the table")
        option("--json", action="store_true", help="for machines")

    option = add(_spike, "show what SpikeRecorder saved at spikes")
    option("path", metavar="DIR", help="a SpikeRecorder's directory, or a file in it")
    return parser


def _summary(chosen: argparse.Namespace) -> int:
    return _print(summarise(chosen.run, _read(chosen.run)), chosen)


def _compare(chosen: argparse.Namespace) -> int:
    return _print(compare((chosen.a, chosen.b), (_read(chosen.a), _read(chosen.b))), chosen)


def _print(described: Summary | Comparison, chosen: argparse.Namespace) -> int:
    if chosen.json:
        print(json.dumps(described.as_json(), indent=2, allow_nan=False))
    else:
        from ignite_monitor.report.text import describe, show

        show(describe(described, chosen.all))
    runs = described.runs if isinstance(described, Comparison) else [described]
    return FAILED if any(run.failed for run in runs) else 0


def _plot(chosen: argparse.Namespace) -> None:
    with _one_line("--metrics"):
        selection = check_pattern("metrics", chosen.metrics)
    output = _output(chosen, ".png")
    run = _read(chosen.run)
    shown = picture(run, selection, chosen.all)
    if not shown.panels:
        raise BadInput(f"none of the {len(run.series)} metrics in {chosen.run} matches {chosen.metrics!r}")
    with _one_line(str(output)):
        draw(shown, output, title=Path(chosen.run).name, dark=chosen.dark)
    print(printable(f"{output}: {plural(len(shown.panels), 'panel')}"))


def _report(chosen: argparse.Namespace) -> int:
    output = _output(chosen, ".html")
    run = _read(chosen.run)
    summary = summarise(Path(chosen.run).name, run)
    with _one_line(str(output)):
        from ignite_monitor.report.page import page

        output.write_text(page(summary, run, with_version(PROGRAM)), encoding="utf-8")
    print(printable(f"{output}: written"))
    return FAILED if summary.failed else 0


def _output(chosen: argparse.Namespace, suffix: str) -> Path:
    """Return where to write: the given file, or one next to the run; never the run itself."""
    output = Path(chosen.output or Path(chosen.run).with_suffix(suffix))
    if output.exists() and Path(chosen.run).exists() and output.samefile(chosen.run):
        raise BadInput(f"{output} is the run itself, and would be overwritten")
    return output


def _spike(chosen: argparse.Namespace) -> None:
    with _one_line(chosen.path):
        from ignite_monitor.report.text import show, spikes_text

        show(spikes_text(Path(chosen.path)))


def _read(path: str) -> Run:
    with _one_line(path):
        run = Run(read_hdf5(path))
        if not run.series and not run.reports:
            raise BadInput(f"{path} holds no metrics: nothing was written to it yet")
        return run


@contextlib.contextmanager
def _one_line(path: str) -> Iterator[None]:
    """Turn errors of bad input into one line that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise BadInput(text if path in text or printable(path) in text else f"{path}: {text}") from None
