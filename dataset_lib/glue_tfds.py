"""GLUE as TFDS prepares it (`glue/sst2`), read without TensorFlow."""

from typing import Any

from dataset_lib import tfds_source
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.glue_tasks import TASKS, GlueTask, check_score
from dataset_lib.tsv_files import Example, check_texts

_UNLABELLED = -1


class TfdsTable:
  """Rows of one split of a prepared builder.

  Args:
    builder: a tfds builder whose data is prepared.
    split: name of a whole split.
    task: what its features mean.

  Raises:
    MissingDataError: there is no such split.
    InvalidDataError: the features are not those of the task.
  """

  def __init__(self, builder: Any, split: str, task: GlueTask):
    import tensorflow_datasets as tfds

    features = builder.info.features
    fitting = [names for names in task.texts if {*names} <= {*features}]
    if not fitting or 'label' not in features:
      wanted = ' or '.join(', '.join(names) for names in task.texts)
      raise InvalidDataError(
        f'{builder.info.full_name}: expected the features {wanted} and label, '
        f'got {", ".join(features)}'
      )
    self._texts, self._task = fitting[0], task
    _check_classes(builder.info.full_name, features['label'], task)
    # Only these are parsed, whatever else the records hold.
    self._features = tfds.features.FeaturesDict(
      {key: features[key] for key in (*self._texts, 'label')}
    )
    instructions = tfds_source.file_instructions(builder, split)
    self._size = sum(part.take for part in instructions)
    self._records = tfds_source.open_records(builder, instructions)
    self.is_labelled = self._is_labelled()

  def __len__(self) -> int:
    return self._size

  def example(self, row: int) -> Example:
    """One row; BadRecord if it cannot be used."""
    parsed, where = self._parsed(row), self.where(row)
    try:
      texts = tuple(parsed[name].decode('utf-8') for name in self._texts)
    except UnicodeDecodeError as error:
      raise BadRecord('not_utf8', where, str(error)) from error
    check_texts(texts, where)
    try:
      if self._task.is_regression:
        return Example(texts, check_score(float(parsed['label'])))
      return Example(texts, self._task.read_label(str(int(parsed['label']))))
    except BadRecord as bad:
      raise BadRecord(bad.kind, where, bad.message) from bad

  def where(self, row: int) -> str:
    """Shard of the row and its place there."""
    return self._records.where(row)

  def _is_labelled(self) -> bool:
    """All of a split has labels or none of it has; bad records do not say."""
    for row in range(self._size):
      try:
        return float(self._parsed(row)['label']) != _UNLABELLED
      except BadRecord:
        continue
    return True

  def _parsed(self, row: int) -> dict[str, Any]:
    from google.protobuf import message

    try:
      return self._features.deserialize_example_np(self._records[row])
    except (message.DecodeError, KeyError, ValueError) as error:
      raise BadRecord('unparsable', self.where(row), str(error)) from error


def _check_classes(name: str, label: Any, task: GlueTask) -> None:
  """Refuses labels in another order than ours."""
  names = tuple(getattr(label, 'names', None) or ())
  if names != task.class_names:
    raise InvalidDataError(
      f'{name}: expected the classes {task.class_names}, got {names}'
    )


def open_table(name: str, data_dir: str, task: str, split: str) -> TfdsTable:
  """The rows of one split of `glue/<task>`.

  Args:
    name: of the builder; '' for `glue/<task>`.
    data_dir: of TFDS, '' for its default; or a folder of one prepared version.
    task: name of the task.
    split: canonical name of the split.

  Raises:
    MissingDataError: it is not prepared; the message has the command.
    InvalidDataError: it is not usable.
  """
  try:
    import tensorflow_datasets  # noqa: F401
  except ImportError as error:
    raise MissingDataError(
      "dataset 'glue' without dataset.directory needs tensorflow-datasets: "
      "pip install 'adaptive-computation[tfds]', or set dataset.directory"
    ) from error
  builder = tfds_source.prepared_builder(name or f'glue/{task}', data_dir)
  return TfdsTable(builder, split, TASKS[task])
