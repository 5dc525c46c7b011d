"""Commands whose process the kernel ends with ours, whatever ends us (PR_SET_PDEATHSIG, on Linux).

The signal follows the *thread* that starts the process: start it from one that lives as long as it shall,
such as the main thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["ends_with_us"]

# The signal is asked for in the child, after the fork and before exec, which keeps it; a parent that died
# meanwhile is noticed by its number. SIGKILL, since a stopped or hanging process must go as well.
_EXEC = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ends_with_us(command: Sequence[str]) -> list[str]:
    """`command`, its program by full path, as a command that asks for the signal first."""
    return [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command]
