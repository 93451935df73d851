"""Former place of :mod:`ignite_monitor.model.isolation`, for packages that still import from it."""

from ignite_monitor.model.isolation import copy_generator_state as copy_generator_state
from ignite_monitor.model.isolation import cuda_devices as cuda_devices
from ignite_monitor.model.isolation import generators_of as generators_of
from ignite_monitor.model.isolation import preserved_rng_state as preserved_rng_state
