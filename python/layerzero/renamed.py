"""Functions under the names of earlier releases. Each works as before, and warns once."""

from __future__ import annotations

from layerzero.control import force_kernel, restart_rollout, unforce_kernel
from layerzero.deprecations import renamed
from layerzero.dispatch_table import release_pins

lock = renamed("lock", force_kernel)
unlock = renamed("unlock", unforce_kernel)
rearm = renamed("rearm", restart_rollout)
unpin = renamed("unpin", release_pins)

#: The old names.
NAMES = frozenset(["lock", "rearm", "unlock", "unpin"])
