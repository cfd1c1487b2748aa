"""What a process that is not root meets: tests run as root may read and write everything."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from alpha.errors import AlphaError

NOBODY = 65534
ESCAPED = 99
"""Exit code of what raises another error than Alpha's."""


def as_nobody(action: Callable[[], object]) -> tuple[int, str]:
    """(exit code, the error's kind and text) of `action` in a child of its own that is nobody. An integer that it returns is the code; an
    error of Alpha's has its own, any other ESCAPED."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, said = ESCAPED, ""
        try:
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            returned = action()
            code = returned if type(returned) is int else 0
        except AlphaError as error:
            code, said = error.exit_code, f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os.write(write, said.encode())
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
