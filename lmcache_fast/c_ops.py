"""`lmcache_ref.c_ops` under the name that users of the fast backends import: the same doors, by the same names.

The doors ask the registry for a backend at each call, so with this package installed `auto` takes its fastest backend
that can run, whichever module the door was imported from.
"""

from lmcache_ref.c_ops import *  # noqa: F403
from lmcache_ref.c_ops import __all__ as __all__
