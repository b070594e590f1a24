"""Events of saves and loads, and their listeners: the log line, the progress bar, the trace.

The public names are those of `__init__.pyi`, resolved on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
