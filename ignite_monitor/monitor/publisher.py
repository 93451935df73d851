"""Former name of :mod:`ignite_monitor.monitor.transfer`."""

import sys
from typing import TYPE_CHECKING

from ignite_monitor.monitor import transfer as _module

if TYPE_CHECKING:
    from ignite_monitor.monitor.transfer import NamedValues as NamedValues
    from ignite_monitor.monitor.transfer import as_published as as_published
    from ignite_monitor.monitor.transfer import is_on_host as is_on_host
    from ignite_monitor.monitor.transfer import joined as joined
    from ignite_monitor.monitor.transfer import transfer as transfer
else:
    sys.modules[__name__] = _module
