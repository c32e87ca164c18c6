"""Calls of code that is not ours, which must not keep rows waiting."""

import logging
from collections.abc import Callable
from typing import Any


def shielded(function: Callable[..., Any], *arguments: Any) -> None:
  """Calls a function; whatever it raises is logged and goes no further.

  Also what is no `Exception`, such as a `sys.exit` in a callback: it is for a
  thread that it knows nothing of.
  """
  try:
    function(*arguments)
  except BaseException:
    logging.getLogger(__name__).exception('in code called by the engine')
