"""One thread per process: the models here are tiny, and threads that wait for each other cost more than they add."""

import gc
import importlib

import ignite.distributed as idist
import pytest
import torch
from torch import distributed

from ignite_monitor import Monitor
from ignite_monitor.monitor import transfer
from tests._ranks import NEEDS_EXPORT

torch.set_num_threads(1)
if not torch.accelerator.is_available():
    # torch's formats three stack traces in each call, for accelerators that may be initialized later.
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture
def one_rank(monkeypatch):
    """A process group of this process alone."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    idist.finalize()  # Ignite, too, forgets the group, if it knows of it
    if distributed.is_initialized():
        distributed.destroy_process_group()


LIBRARIES: list[torch.library.Library] = []  # keeps the operators defined


def import_torchvision():
    """Import torchvision, without its operators if it is built for another torch: timm and transformers import it."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def pytest_collection_finish(session):
    """Freeze imported and collected objects, so that the garbage collector does not traverse them again.

    It runs less often, too, which takes 3 to 5 % off the tests of monitors, gradients and files.
    """
    if any(item.get_closest_marker("compatibility") for item in session.items):
        import_torchvision()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Skip what needs torch.export where torch is too old for it."""
    if NEEDS_EXPORT is not None and call.excinfo is not None and NEEDS_EXPORT in str(call.excinfo.value):
        call.excinfo = pytest.CallInfo.from_call(lambda: pytest.skip(NEEDS_EXPORT), call.when).excinfo


@pytest.fixture
def on_a_device(monkeypatch):
    """Lets monitors believe that one has to wait for what they publish, as on an accelerator."""
    monkeypatch.setattr(transfer, "HOST", set())


@pytest.fixture(autouse=True)
def monitors_that_fail(request, monkeypatch):
    """Let errors of monitors end training, which goes on without the monitor elsewhere."""
    if request.node.get_closest_marker("allows_failed_monitors") is None:

        def unguarded(monitor, function, *arguments):
            return function(*arguments)

        monkeypatch.setattr(Monitor, "_guarded", unguarded)
