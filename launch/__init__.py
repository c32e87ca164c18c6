"""Command lines; run them from the checkout, `python -m launch.train`."""

import os
import sys
from typing import Any


def _end_if_interrupted(kind: type[BaseException], *rest: Any) -> None:
  """Ends a command that is interrupted while it imports, with one line."""
  if not issubclass(kind, KeyboardInterrupt):
    return sys.__excepthook__(kind, *rest)
  os.write(2, b'error: interrupted\n')
  os._exit(130)


if sys.argv[0] == '-m':  # `python -m launch.train` imports its package first
  sys.excepthook = _end_if_interrupted
  # Python puts the working directory first, which may be a run of others: its
  # files must not replace modules.
  root = os.path.dirname(os.path.dirname(__file__))
  if not sys.flags.safe_path and sys.path[0] != root:
    sys.path.append(sys.path.pop(0))
