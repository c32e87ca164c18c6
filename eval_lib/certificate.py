"""The certificate of a run, which `serve_lib.classifier` reads.

See `eval_lib.risk` for what is certified, and under which conditions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from absl import logging
from annotated_types import Interval

from core import files, registry
from core.errors import ConfigError
from eval_lib import calibration, heads, risk
from eval_lib.risk import Method, Risk, Variant, build_grid, choose, test_of
from halting.row_rules import scale

FILE = 'certificate.json'  # in the directory of a run
EPSILONS = 0.01, 0.02, 0.05, 0.1
NO_CHOICE = 'the model has no exits, and no cheaper settings were offered'
ROOM = 1.25  # rows over those that suffice if no row gets worse


def emptiness(entry: Mapping[str, Any]) -> str:
  """Returns why a certificate, which certifies nothing, needs more rows."""
  rows = f'{entry["solved"]} solved' if 'solved' in entry else entry.get('rows')
  least = f'at least {entry.get("rows_needed", "more")} are needed'
  more = 'and more for each row that gets worse'
  return f'certifies nothing: {rows} rows; {least}, {more}'


def words(entry: Mapping[str, Any], loss: str = '') -> str:
  """Returns what a certificate says, in a sentence; `loss`: what loses."""
  if not entry:
    return 'No certificate was made.'
  rows, limit = entry['rows'], f'{entry["epsilon"]:.0%}'
  sure = f'{1 - entry["delta"]:.0%}'
  if entry['tau'] is None:
    return (
      f'Nothing is certified on {rows} rows, so every row runs to full depth: '
      f'a loss of at most {limit} with confidence {sure} needs at least '
      f'{entry["rows_needed"]} rows. launch.evaluate --labelled certifies '
      'again on more.'
    )
  changes = entry.get('model', {})
  loss = loss or ('cheaper settings' if changes else 'early exits')
  of = {'accuracy': 'of accuracy', 'f1': 'of F1'}
  lost = of.get(entry['risk'], f'by the risk {entry["risk"]!r}')
  # A model with one head has no `tau`, but a field with a certified value.
  shown = ', '.join(
    f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
    for name, value in {'threshold': entry['tau'], **changes}.items()
  )
  gain = f'{entry["early"]:.0%} of these rows leave early'
  if changes and not entry['early']:
    gain = f'this saves {entry["saved"]:.1%} of its FLOPs as trained'
  return (
    f'With confidence {sure} {loss} lose at most {limit} {lost} '
    f'({shown}, certified on {rows} rows); {gain}.'
  )


@dataclasses.dataclass(kw_only=True)
class Evaluator(heads.Evaluator):
  """Certifies the cheapest setting on `split`; writes certificate.json.

  Temperatures come from calibration.json, if there is one. The rows may be
  neither of its calibration split nor of training. The file keeps a certificate
  for each `source` of rows, on its own rows and with its own `delta`; that of
  '' is for all other sources. `--dataset` certifies again on other rows.
  """

  METRICS = 'saved', 'early', 'bound', 'tau', 'rows_needed'
  calibration_split: None = None
  risk: Risk = 'accuracy'  # see `eval_lib.risk.losses`
  method: Method = 'sequence'  # see `eval_lib.risk.choose`
  # 0: the first of `EPSILONS` that the number of rows can certify.
  epsilon: Annotated[float | int, Interval(ge=0.0, le=0.5)] = 0.02
  delta: Annotated[float | int, Interval(ge=1e-6, le=0.5)] = 0.1
  source: str = ''
  # Also models that save more than the trained one; see `Task.cheaper`.
  cheaper: bool = False
  replace: bool = False  # one that saves more or has a smaller `epsilon`

  def __post_init__(self):
    super().__post_init__()
    self.check_untrained('split')
    classes = self.classes.stop - self.classes.start
    if self.risk == 'f1' and classes != 2:
      raise ConfigError('risk', 'f1', f'another for {classes} classes')
    self._written()  # a damaged one is found before the work

  def run(self, variables: Any) -> dict[str, float]:
    """Measures the grid and writes the certificate into the workdir.

    Returns `saved` (share of the FLOPs of full depth, or of its layers if the
    task counts none), `early` (share of the rows that leave before the last
    head) and, if a setting was certified, `tau` and `bound` (of the risk), else
    `rows_needed`, the fewest that certify one if no row gets worse. Raises
    ConfigError if that would replace a better certificate, see `replace`.
    """
    workdir, column = self.context.workdir, self.column
    file = calibration.CalibrationFile(workdir, column=column)
    # Computed by all processes together, also where a file is not seen.
    parameters = calibration.fingerprint(variables)
    file.check_fingerprint(parameters)
    self.check_unfitted(file)
    cheaper = self.context.cheaper if self.cheaper else ()
    if self.cheaper and not cheaper:
      logging.warning(
        'cheaper: the model, or its rule, has no cheaper settings; its class '
        'gives them, see `cheaper` of Task and TokenRule'
      )
    measured = [
      self._measure(variables, changes, outputs, file)
      for changes, outputs in (({}, self.context.outputs), *cheaper)
    ]
    variants, labels = [variant for variant, _ in measured], measured[0][1]
    epsilon = self._epsilon(len(labels), len(variants))
    delta = float(self.delta)
    grid = build_grid(variants, labels, self.risk, epsilon)
    best, bound = choose(grid, self.risk, self.method, epsilon, delta)
    entry = self._entry(grid, best, bound, variants, (epsilon, delta))
    if best is None:
      groups = len(np.unique(grid.groups))
      needed = risk.least_rows(self.risk, self.method, epsilon, delta, groups)
      entry['rows_needed'] = needed
    self.note = emptiness(entry) if best is None else f'says: {words(entry)}'
    if len(grid.thresholds) == 1:
      self.note = 'has no choice: ' + NO_CHOICE
    if self.seen:
      told = (
        f'{self.seen} of {len(labels)} rows have texts of the training split'
      )
      self.note = f'{self.note} ({told}: certify on rows that are new)'.strip()
    temperatures = file.temperatures(len(variants[0].logits))
    self.store(entry, parameters, temperatures)
    results = {n: entry[n] for n in self.METRICS if entry.get(n) is not None}
    if len(variants[0].logits) > 1:
      return results
    # Without exits `tau` is always 1: what was chosen is a field of the model.
    results.pop('tau', None)
    changed = entry['model'].items()
    return results | {n: x for n, x in changed if isinstance(x, float)}

  def _epsilon(self, rows: int, groups: int) -> float:
    """Returns the bound; without one it depends on the number of rows alone."""
    how = self.risk, self.method, float(self.delta), groups
    return float(self.epsilon) or smallest(rows, *how)

  def store(
    self, entry: dict[str, Any], parameters: str, temperatures: Any
  ) -> None:
    """Adds a certificate to the file, which keeps the model's other sources."""
    if not (path := self.file(FILE)):
      return
    settings = {'parameters': parameters, 'temperatures': [*temperatures]}
    old = self._written()
    # Certificates of another model are dropped.
    same = all(old.get(name) == value for name, value in settings.items())
    kept = old['sources'] if same else {}
    self._check_better(entry, kept.get(self.source))
    sources = {**kept, self.source: entry}
    saved = [c['saved'] for c in old.get('sources', {}).values()]
    if not same and max(saved, default=0.0) > entry['saved']:
      dropped = f'of other parameters, which saved {max(saved):.1%}'
      self.note = f'{self.note} (in place of one {dropped})'.strip()
    files.write_json(path, settings | {'sources': sources})

  def _written(self) -> dict[str, Any]:
    """Returns the content of certificate.json, {} without one."""
    if (path := self.file(FILE)) and path.exists():
      with files.damage_of(path):
        content = files.read_object(path)
        for entry in content['sources'].values():
          float(entry['saved']), entry['epsilon'], entry['rows']
        return content
    return {}

  def _check_better(self, entry: Any, old: Any) -> None:
    """Raises ConfigError if one saves or promises less than the old one."""
    if self.replace or old is None:
      return
    is_weaker = old['saved'] > 0 and entry['epsilon'] > old['epsilon']
    if entry['saved'] >= old['saved'] and not is_weaker:
      return
    before, after = (
      f'epsilon={row["epsilon"]:g} on {row["rows"]} rows saves '
      f'{row["saved"]:.1%}' for row in (old, entry)
    )  # fmt: skip
    if needed := entry.get('rows_needed'):
      after += f'; it needs at least {needed} rows'
    name = f'certificate_{self.column}' if self.column else 'certificate'
    source = f' of {self.source!r}' if self.source else ''
    expected = f'True (--config.evals.{name}.replace=true) to replace the '
    expected += f'certificate{source} ({before})'
    raise ConfigError('replace', f'False for another ({after})', expected)

  def _measure(self, variables, changes, outputs, file) -> tuple[Variant, Any]:
    """Returns a model on the rows of the split, and their labels."""
    rows = self.collect('split', variables, outputs)
    logits, labels = np.moveaxis(rows['logits'], 1, 0), rows['label']
    layers = [*self.names(len(logits)).values()]
    if temperatures := file.temperatures(len(logits)):
      logits = scale(logits, temperatures)
    cost = rows.get('flops', np.tile(layers, (len(labels), 1)))
    cost = cost.astype(np.float64).reshape(len(labels), -1)
    return Variant(changes, logits, cost), labels

  def _entry(self, grid, best, bound, variants, limits) -> dict[str, Any]:
    """Returns the certificate of a setting; None is full depth as trained."""
    chosen, tau, parts = variants[0], None, (0.0, 0.0, 0.0)
    if best is not None:
      chosen = variants[grid.variants[best]]
      tau = float(grid.thresholds[best])
      # Costs are shares of a mean: at full depth 1 is off by a rounding.
      saved = round(1.0 - grid.cost[:, best].mean(), 12) + 0.0  # not -0.0
      mean = risk.mean_risk(self.risk, grid.losses[:, best])
      parts = mean, saved, grid.early[best]
    at = calibration.DRIFT_THRESHOLD if tau is None else tau
    drift = calibration.drift_statistics(chosen.logits, at)
    if chosen.changes:  # the model as trained serves during drift
      full = calibration.drift_statistics(variants[0].logits, at)
      drift['during'] = full['confidences']
    return {
      'tau': tau,
      'model': {
        name: registry.described(v) if dataclasses.is_dataclass(v) else v
        for name, v in chosen.changes.items()
      },
      'risk': self.risk,
      'method': self.method,
      'test': test_of(self.risk).__name__,
      **dict(zip(('epsilon', 'delta'), limits, strict=True)),
      'rows': len(grid.losses),
      'bound': None if best is None else bound,
      **dict(zip(('mean', 'saved', 'early'), map(float, parts), strict=True)),
      'dataset': self.data,
      'split': self.split,
      'drift': drift,
    }


def smallest(
  rows: int,
  loss: Risk = 'accuracy',
  method: Method = 'sequence',
  delta: float = 0.1,
  groups: int = 1,
) -> float:
  """Returns the first of `EPSILONS` that `rows` can certify, or the last."""
  for epsilon in EPSILONS[:-1]:
    if ROOM * risk.least_rows(loss, method, epsilon, delta, groups) <= rows:
      return epsilon
  return EPSILONS[-1]
