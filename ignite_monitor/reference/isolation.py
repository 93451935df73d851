"""Former place of :mod:`ignite_monitor.model.isolation`, for packages that still import from it."""

from ignite_monitor.model.isolation import is_reference_run as is_reference_run
