"""One pass over a split: accuracy, loss and what else the task reports."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, text
from eval_lib import evaluator, metrics


class Evaluator:
  """Merges `context.measure` over a split.

  Padding has mask 0 and never counts, so the result does not depend on the
  batch size or the number of devices (up to the order of float32 sums within
  a batch; batches merge in float64).

  Configuration: `split`, and `dataset` if not the run's own.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'split': text('the name of a split', 'test'),
    'dataset': evaluator.DATASET,
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    self._context = context
    self._dataset = evaluator.build_dataset(
      config['dataset'], config['split'], context
    )
    classes = self._dataset.info.num_classes
    if context.num_classes not in (None, classes):
      raise ConfigError(
        'dataset',
        f'{classes} classes in split {config["split"]!r}',
        f'the {context.num_classes} classes of the model; few-shot evaluation '
        'takes any',
      )

  def run(self, variables: Any) -> dict[str, float]:
    """Metrics by the names that the task gives them."""
    merged, previous = None, None
    for batch in evaluator.on_devices(self._dataset, self._context):
      state = self._context.measure(variables, batch)
      # Fetched one batch late: the device is never idle, and never further
      # ahead than one batch, which would fill its memory with inputs.
      if previous is not None:
        merged = metrics.merge_on_host(merged, previous)
      previous = state
    if previous is not None:
      merged = metrics.merge_on_host(merged, previous)
    return {name: metric.compute() for name, metric in (merged or {}).items()}
