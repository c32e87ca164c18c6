"""Text files that readers always see whole."""

import os
import pathlib


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Replaces a file: it has the old content or, all on disk, the new."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with temporary.open('w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)
