"""Python calls that GradMonitor adds to an iteration: the same in every run, unlike times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor
from tests._helpers import make_step, square_loss

ITERATION = 30
# 292 are the hooks, one for each gradient. Optimizers of older releases run through more functions.
LIMIT = 500 if torch.__version__ >= "2.13" else 518


def calls(attach: Callable[[nn.Module, torch.optim.Optimizer, Engine], Any]) -> int:
    """Python calls of one iteration, in a model with 292 parameters."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 24, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(5, 8), encoder, nn.LayerNorm(8), nn.Linear(8, 5, bias=False))
    assert len(list(model.parameters())) == 292
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    engine = Engine(make_step(model, optimizer, loss_of=square_loss))
    attach(model, optimizer, engine)
    engine.add_event_handler(Events.GET_BATCH_STARTED(once=ITERATION), lambda: sys.setprofile(profile))
    engine.add_event_handler(Events.GET_BATCH_STARTED(once=ITERATION + 1), lambda: sys.setprofile(None))
    engine.run([torch.arange(5).view(1, 5)] * (ITERATION + 2))
    assert sys.getprofile() is None
    return count


def test_python_calls_of_a_monitored_iteration():
    plain = calls(lambda model, optimizer, engine: None)
    assert calls(lambda model, optimizer, engine: GradMonitor(model, optimizer).attach(engine)) - plain <= LIMIT
