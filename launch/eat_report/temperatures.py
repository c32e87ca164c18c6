"""The temperatures of a run's heads, and which rows they were fitted to.

What was fitted cannot judge itself: the calibration error of a head is measured
on the other rows (EAT, section 7.2).
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from dataset_lib import builder
from dataset_lib.source import places
from eat import serving
from eat.calibration_file import CalibrationFile
from eval_lib import calibration, predictions
from launch.eat_report import models
from launch.eat_report.models import Run
from train_lib.run_directory import TOKENIZER


@dataclasses.dataclass(frozen=True)
class Temperatures:
  """Of the heads, as they are served.

  Attributes:
    values: `[E]`, 1 where there is nothing to fit.
    source: where they come from, in words.
    split: what they were fitted to; '' for nothing, or if it is not known.
    dataset: the data set of the split, as the builder takes it.
  """

  values: np.ndarray
  source: str
  split: str = ''
  dataset: Any = None


def of(run: Run) -> Temperatures:
  """From the run's calibration.json, or fitted here as its configuration says.

  Raises:
    ConfigError: calibration.json is of another checkpoint.
  """
  file = CalibrationFile.read(run.directory, run.step)
  file.check_parameters(run.variables)
  written = file.values
  if written.get('temperatures'):
    values = np.asarray(written['temperatures'])
    split = written.get('calibration_split', '')
    what = f'fitted to {split}' if split else 'it does not say of which rows'
    dataset = written.get('dataset', run.config.dataset)
    return Temperatures(values, f'calibration.json, {what}', split, dataset)
  heads = serving.as_adaptive(run.task.model).heads()
  split = run.config.evals.get('calibration', {}).get('calibration_split', '')
  if not split or run.task.info.num_classes < 2 or len(heads) == 1:
    return Temperatures(np.ones(len(heads)), 'none')
  rows = models.outputs(run, run.task.model, split)
  values = calibration.fit_temperatures(
    predictions.heads_first(rows), rows['label']
  )
  return Temperatures(
    values, f'fitted here to {split}', split, run.config.dataset
  )


def fitted_rows(run: Run, temperatures: Temperatures) -> np.ndarray:
  """Which rows of the run's split the temperatures were fitted to, bool `[N]`.

  Rows are the same if they lie in the same place of the same file. None is
  known to be where calibration.json does not name a split.

  Raises:
    MissingDataError: the rows that they were fitted to are not there any more.
  """
  if not temperatures.split:
    return np.zeros(len(run.records), bool)
  dataset = dict(temperatures.dataset.items())
  if 'tokenizer' in dataset:  # the file that it names may have been moved
    dataset['tokenizer'] = str(pathlib.Path(run.directory) / TOKENIZER)
  fitted = set(places(builder.build_source(dataset, temperatures.split)))
  return np.array([place in fitted for place in places(run.records)])
