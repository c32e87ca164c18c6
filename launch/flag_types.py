"""Types of flags: each reads a text or raises ValueError.

argparse prints their names when they refuse a text.
"""


def positive(text: str) -> int:
  """An integer above 0."""
  if not text.isdecimal() or int(text) < 1:
    # The type argparse turns into a message that names the flag.
    raise ValueError(text)
  return int(text)


def count(text: str) -> int:
  """An integer, 0 or more."""
  return 0 if text == '0' else positive(text)


def sizes(text: str) -> tuple[int, ...]:
  """`1,16` as ascending integers above 0."""
  return tuple(sorted({positive(size) for size in text.split(',')}))


def sizes_or_none(text: str) -> tuple[int, ...]:
  """As `sizes`, or () for `none`."""
  return () if text == 'none' else sizes(text)


def percents(text: str) -> tuple[int, ...]:
  """`0,80` as ascending integers from 0 to 100."""
  rates = sorted({count(rate) for rate in text.split(',')})
  if rates[-1] > 100:
    raise ValueError(text)
  return tuple(rates)


def seconds(text: str) -> float:
  """A finite number above 0."""
  value = float(text)
  if not 0.0 < value < 1e9:
    raise ValueError(text)
  return value


def checkpoint(text: str) -> int | str | None:
  """A step's number, 'best', or None for `latest`."""
  if text == 'latest':
    return None
  return 'best' if text == 'best' else count(text)


def checkpoints(text: str) -> int | str | None:
  """As `checkpoint`, or 'all'."""
  return 'all' if text == 'all' else checkpoint(text)


positive.__name__ = 'positive integer'
count.__name__ = 'integer of 0 or more'
sizes.__name__ = 'list of positive integers such as 1,16'
sizes_or_none.__name__ = "list of positive integers such as 1,16, or 'none'"
percents.__name__ = 'list of integers from 0 to 100 such as 0,80'
checkpoint.__name__ = "step: 'latest', 'best' or a number"
checkpoints.__name__ = "step: 'latest', 'best', 'all' or a number"
seconds.__name__ = 'positive number of seconds'
