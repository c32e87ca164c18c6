"""The evaluator 'calibration': fits temperatures, writes calibration.json."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from dataset_lib import atomic_file, builder
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, integer, real, text
from eval_lib import evaluator, held_out, predictions, risk
from eval_lib.calibration import (
  BINS,
  FILE,
  ONLY_ABOVE,
  drift_statistics,
  errors,
  fingerprint,
  fit_temperatures,
)


class Evaluator:
  """ECE of each head before and after temperature; writes calibration.json.

  Temperatures are fitted on `calibration_split`, of those heads whose ECE
  there is above `only_above`; the ECEs that are reported are of `split`. With
  `epsilon` above 0 a confidence threshold with a guarantee (see
  `eval_lib.risk`) is certified on `split`, which nothing was fitted to: with
  probability 1 - `delta`, at most a share `epsilon` of the answers differ from
  the full model's. The file says of which parameters and data all this is, so
  that it is not used for another checkpoint.

  Configuration: `split`, `calibration_split`, `bins`, `only_above`,
  `threshold` (at which the statistics for the drift check are taken, on
  `calibration_split`), `epsilon`, `delta`, `layers` of the heads, and
  `dataset` if not the run's own.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'split': text('the name of a split', 'validation'),
    'calibration_split': text(
      'the name of a split that neither training nor `split` uses, such as '
      "'validation[:50%]' with the split 'validation[50%:]'"
    ),
    'bins': integer(1, 1000, BINS),
    'only_above': real(0.0, 1.0, ONLY_ABOVE),
    'threshold': real(0.0, 1.0, 0.9),
    'epsilon': real(0.0, 0.5, 0.0),
    'delta': real(1e-6, 0.5, 0.1),
    'layers': predictions.LAYERS,
    'dataset': evaluator.DATASET,
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    layers = config['layers'] or context.layers
    self._config, self._context = {**config, 'layers': layers}, context
    if config['split'] == config['calibration_split']:
      raise ConfigError(
        'calibration_split',
        config['calibration_split'],
        'another split than `split`: what was fitted cannot judge itself',
      )
    self._dataset, self._held_out = held_out.build(config, context)
    if config['epsilon']:
      held_out.check_untrained(self._dataset, 'split', config, context)

  def run(self, variables: Any) -> dict[str, float]:
    """Fits, measures and writes `calibration.json` into the workdir.

    Returns:
      For every head (`layer_4`, or `head_1` without `layers`):
      `ece_<head>`, `ece_calibrated_<head>`, `temperature_<head>`; with
      `epsilon` also `guaranteed_early` (share of the rows that leave before
      the last head) and, if one was certified, `guaranteed_threshold`.
    """
    logits, labels = self._record(
      'calibration_split', self._held_out, variables
    )
    bins, only_above = self._config['bins'], self._config['only_above']
    temperatures = fit_temperatures(logits, labels, bins, only_above)
    layers = predictions.layers_of(self._config['layers'], len(logits))
    report = {
      'parameters': fingerprint(variables),
      'dataset': builder.validate(self._config['dataset']),
      'calibration_split': self._config['calibration_split'],
      'calibration_rows': len(labels),
      'calibration_ece': errors(logits, labels, bins),
      'temperatures': temperatures.tolist(),
      'drift': drift_statistics(
        predictions.probabilities(logits, temperatures),
        float(self._config['threshold']),
      ),
    }
    logits, labels = self._record('split', self._dataset, variables)
    report |= {
      'split': self._config['split'],
      'rows': len(labels),
      'layers': layers,
      'bins': bins,
      'ece': errors(logits, labels, bins),
      'ece_calibrated': errors(logits, labels, bins, temperatures),
      'guarantee': self._certify(
        predictions.probabilities(logits, temperatures)
      ),
    }
    if self._context.workdir and jax.process_index() == 0:
      path = pathlib.Path(self._context.workdir) / FILE
      lines = json.dumps(report, indent=2, allow_nan=False)
      atomic_file.write_text(path, lines + '\n')
    return self._metrics(report)

  def _record(self, split, dataset, variables):
    name = self._config[split]
    return predictions.labelled_logits(dataset, name, variables, self._context)

  def _certify(self, probabilities) -> dict[str, Any] | None:
    """A threshold for the disagreement, or None if none is asked for."""
    epsilon, delta = self._config['epsilon'], self._config['delta']
    if not epsilon:
      return None
    guarantee, early = risk.certify_confidence(
      probabilities, float(epsilon), float(delta)
    )
    return {'loss': 'disagreement', 'early': early} | dataclasses.asdict(
      guarantee
    )

  def _metrics(self, report: Mapping[str, Any]) -> dict[str, float]:
    names = predictions.head_names(
      self._config['layers'], len(report['temperatures'])
    )
    result: dict[str, float] = {}
    for place, name in enumerate(names):
      result |= {
        f'ece_{name}': report['ece'][place],
        f'ece_calibrated_{name}': report['ece_calibrated'][place],
        f'temperature_{name}': report['temperatures'][place],
      }
    if report['guarantee']:
      result['guaranteed_early'] = report['guarantee']['early']
      if report['guarantee']['threshold'] is not None:
        result['guaranteed_threshold'] = report['guarantee']['threshold']
    return result
