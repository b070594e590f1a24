"""The reports that the functions of this package return, and their parts.

Nobody needs to construct one; the names are for annotations and for `isinstance`. They are those of
`reports.pyi`, resolved on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
