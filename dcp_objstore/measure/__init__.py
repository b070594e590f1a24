"""Measure saves and loads on the user's own store and machine.

The public names are those of `__init__.pyi`, resolved on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
