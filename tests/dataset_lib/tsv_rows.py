"""Files of rows, plain or gzipped, for the tests of their readers."""

import gzip


def write(path, rows, end='\n'):
  path.parent.mkdir(exist_ok=True)
  data = b''.join(
    (row if isinstance(row, bytes) else row.encode()) + end.encode()
    for row in rows
  )
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  return path
