"""Former place of :mod:`ignite_monitor.model.isolation`, for packages that still import from it."""

from ignite_monitor.model.isolation import cuda_devices as cuda_devices
