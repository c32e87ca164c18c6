"""A smaller dense model, made of every second layer of another."""

import os

from eat.task import FineTune
from train_lib.text_classification import TextClassification, checkpoint_sizes


class Student(FineTune):
  """A dense model made of every second layer of another, as DistilBERT.

  A `model.depth` of 0 is half that of the checkpoint or variant, rounded up;
  empty `warm_start.renames` say which of its layers becomes which.
  """

  @classmethod
  def resolve(cls, config) -> None:
    """Also halves the depth and writes the renames."""
    given = config.model.depth
    TextClassification.resolve(config)
    depth = config.model.depth
    directory = config.warm_start.workdir
    if os.path.isdir(directory):
      depth = checkpoint_sizes(directory).get('depth', depth)
      if not config.warm_start.renames:
        config.warm_start.renames = every_second_layer(depth)
        if depth > 1:
          config.warm_start.skip = (*config.warm_start.skip, '^dropped_')
    config.model.depth = given or (depth + 1) // 2
    super().resolve(config)


def every_second_layer(layers: int) -> tuple[str, ...]:
  """Renames that make layers 1, 3, 5, ... of a teacher a student's layers.

  As DistilBERT is initialised (Sanh et al. 2019, section 3).
  """
  renames = []
  for index in range(layers):
    new = f'dropped_{index}/' if index % 2 else f'block_{index // 2}/'
    renames.append(f'^block_{index}/->{new}')
  return tuple(renames)
