"""What an HDF5Logger attaches to engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ignite.engine import Engine
from ignite.handlers.base_logger import BaseOptimizerParamsHandler, BaseOutputHandler


class ValueWriter(Protocol):
    """What the handlers have to know of the logger."""

    @property
    def is_writing(self) -> bool:
        """Whether values are taken."""

    def write(self, engine: Engine, step: Any, values: dict[Any, Any], tag: str | None = None) -> None:
        """Append values to the file.

        Args:
            tag: what to put before the names, with a slash.
        """

    def warn_once(self, about: str, message: str) -> None:
        """Give a warning, unless there was one about the same."""


class OutputHandler(BaseOutputHandler):
    """Writes an engine's metrics, output and state attributes.

    Args:
        tag: what to put before the names, with a slash; None for nothing.
        metric_names: names in ``engine.state.metrics``, or ``"all"``.
        output_transform: takes the engine's output, gives a number, a tensor or a dict.
        global_step_transform: takes engine and event, gives the step; by default the engine's iteration or epoch.
    """

    def __init__(
        self,
        tag: str | None = None,
        metric_names: str | list[str] | None = None,
        output_transform: Callable[..., Any] | None = None,
        global_step_transform: Callable[[Engine, Any], int] | None = None,
        state_attributes: list[str] | None = None,
    ) -> None:
        super().__init__(tag or "", metric_names, output_transform, global_step_transform, state_attributes)

    def __call__(self, engine: Engine, logger: ValueWriter, event_name: Any) -> None:
        if _writes(self, logger):
            step = self.global_step_transform(engine, event_name)
            logger.write(engine, step, self._values(engine, logger), self.tag or None)

    def _values(self, engine: Engine, logger: ValueWriter) -> dict[Any, Any]:
        metrics, values = engine.state.metrics, {}
        if self.metric_names == "all":
            values.update(metrics)
        else:
            for name in self.metric_names or ():
                if name in metrics:
                    values[name] = metrics[name]
                else:
                    logger.warn_once(f"absent {name}", f"Metric {name} is not in engine.state.metrics: {list(metrics)}")
        if self.output_transform is not None:
            output = self.output_transform(engine.state.output)
            values.update(output if isinstance(output, dict) else {"output": output})
        values.update({name: getattr(engine.state, name, None) for name in self.state_attributes or ()})
        return values


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Writes a parameter of an optimizer's groups, as ``{tag}/{param_name}/group_{i}``.

    Args:
        optimizer: the optimizer, or anything with ``param_groups``.
        tag: what to put before it, with a slash; None for nothing.
    """

    def __call__(self, engine: Engine, logger: ValueWriter, event_name: Any) -> None:
        if _writes(self, logger):
            groups = {f"group_{i}": group[self.param_name] for i, group in enumerate(self.optimizer.param_groups)}
            logger.write(engine, engine.state.get_event_attrib_value(event_name), {self.param_name: groups}, self.tag)


def _writes(handler: object, logger: ValueWriter) -> bool:
    if not hasattr(logger, "is_writing"):
        raise RuntimeError(f"Handler {type(handler).__name__} works only with HDF5Logger")
    return logger.is_writing
