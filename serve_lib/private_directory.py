"""A directory that nobody else may write to."""

import os
import stat


def private_directory(path: str) -> str:
  """Makes a directory of one's own, or takes it if it is there.

  What is run from a directory, as compiled programs are, is as trustworthy as
  whoever may write there.

  Args:
    path: of the directory; its parent is there.

  Returns:
    The path; '' if it cannot be made or written, is somebody else's or no
    directory, or others may write to it.
  """
  try:
    os.makedirs(path, 0o700, exist_ok=True)
    found = os.lstat(path)  # of a link itself: it may lead anywhere
  except OSError:
    return ''
  is_private = (
    stat.S_ISDIR(found.st_mode)
    and found.st_uid == os.getuid()
    and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  )
  return path if is_private and os.access(path, os.W_OK | os.X_OK) else ''
