"""How everything here is compiled.

No reference counting (`_nrt`: nothing is allocated here, and the counters took half of the time), no exceptions, and small
functions inlined. Numba's own cache is not used: the machine code is kept as a whole (machine.py).
"""

from __future__ import annotations

from typing import Any

import numba as nb

OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}
compiled = nb.njit(**OPTIONS)
inlined = nb.njit(forceinline=True, **OPTIONS)
