"""Classes and labels of several tasks, which one model answers together.

The classes of all tasks are numbered together, named 'task=class', so that the
heads' last layer is one matrix, whose columns are cut by task.
"""

from collections.abc import Sequence
from typing import Any


def tasks_of(class_names: Sequence[str]) -> dict[str, slice]:
  """Returns the classes of each task, of names such as 'domain=billing'."""
  owners = [name.partition('=')[0] for name in class_names]
  return {
    task: slice(owners.index(task), owners.index(task) + owners.count(task))
    for task in dict.fromkeys(owners)
  }


def labels_of(labels: Any, classes: slice) -> Any:
  """Returns the labels `[B]` of one task, -1 for none, of those of all.

  The labels `[B, T]` are ids among the classes of all tasks, in any order.
  """
  own = (labels >= classes.start) & (labels < classes.stop)
  return ((labels - classes.start + 1) * own).max(-1) - 1
