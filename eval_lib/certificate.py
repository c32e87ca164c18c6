"""The certificate of a run, which `serve_lib.classifier` reads.

See `eval_lib.risk` for what is certified, and under which conditions.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from absl import logging
from annotated_types import Interval

from core import files, registry
from core.errors import ConfigError, InvalidDataError, UserError
from eval_lib import calibration, heads, risk
from eval_lib.risk import Method, Risk, Variant, build_grid, choose, test_of
from halting.row_rules import Confidence, scale

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


def about_rows(entry: Mapping[str, Any]) -> str:
  """Returns sentences on the rows of a certificate, after a space, or ''."""
  said, kinds = '', {'copies': 'copies of others'}
  kinds['known'] = 'with inputs of the training or calibration'
  if accuracy := entry.get('accuracy'):
    full, served = (f'{100 * value:.1f} %' for value in accuracy)
    full += ' as trained' if entry.get('model') else ' at full depth'
    said = f' Accuracy on these rows: {full}, {served} as served.'
  counts = {k: n for k, n in entry.get('left_out', {}).items() if n}
  left = ', '.join(f'{count} {kinds[kind]}' for kind, count in counts.items())
  said += f' Rows that are left out: {left}.' if left else ''
  if entry.get('unchecked'):
    said += ' The files of the training are gone or changed, so that rows with '
    said += 'inputs of the training may be among these.'
  if group := entry.get('group'):
    said += f' Rows of one {group} count as independent, which they may not be.'
  return said


def words(entry: Mapping[str, Any], loss: str = '') -> str:
  """Returns what a certificate says, in sentences; `loss`: what loses."""
  if not entry:
    return 'No certificate was made.'
  rows = f'{entry["rows"]} rows'
  rows += f' of {entry["of"]}' if 'of' in entry else ''
  sure = f'with confidence {100 * (1 - entry["delta"]):g}%'
  if entry.get('method') == 'conformal':
    sure = 'on average over draws of such rows'
  limit = f'{100 * entry["epsilon"]:g}% by the risk {entry["risk"]!r}'
  if of := {'accuracy': 'accuracy', 'f1': 'F1'}.get(entry['risk']):
    points = f'{100 * entry["epsilon"]:g}'
    limit = f'{points} point{"s" * (points != "1")} of {of}'
  if entry['tau'] is None:
    return (
      f'Nothing is certified on {rows}, so every row runs to full depth: '
      f'a loss of at most {limit} {sure} needs at least '
      f'{entry["rows_needed"]} rows, and more for each row that gets worse. '
      f'launch.evaluate --labelled certifies again on more.{about_rows(entry)}'
    )
  changes = entry.get('model', {})
  loss = loss or ('cheaper settings' if changes else 'early exits')
  against = 'the model as trained' if changes else 'its own full depth'
  # A model with one head has no `tau`, but a field with a certified value.
  shown = ', '.join(
    f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
    for name, value in {'threshold': entry['tau'], **changes}.items()
  )
  gain = f'{entry["early"]:.0%} of these rows leave early'
  if changes and not entry['early']:
    gain = f'this saves {entry["saved"]:.1%} of its FLOPs as trained'
  return (
    f'{sure.capitalize()} {loss} lose at most {limit} against {against} '
    f'({shown}, certified on {rows}); {gain}.{about_rows(entry)}'
  )


def _summary(entry: Mapping[str, Any]) -> str:
  limit = f'epsilon {entry["epsilon"]:g} of {entry["risk"]}'
  return f'{limit} on {entry["rows"]} rows, which saves {entry["saved"]:.1%}'


class WeakerError(UserError, ValueError):
  """A certificate that promises less than the one that it would replace."""


@dataclasses.dataclass(kw_only=True)
class Evaluator(heads.Evaluator):
  """Certifies the cheapest setting on `split`; writes certificate.json.

  Temperatures come from calibration.json, if there is one. The rows may be
  neither of its calibration split nor of training; rows of other files with
  such inputs, and copies of rows, are left out. The file keeps a certificate
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
  replace: bool = False  # also by one that promises less
  left_out: Mapping[str, int] = dataclasses.field(
    default_factory=dict, init=False
  )

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
    WeakerError if that would replace one that promises more.
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
    heads = [len(variant.logits) for variant in variants]
    # As of `build_grid`: settings of one head are one group.
    groups = len({n if count > 1 else 0 for n, count in enumerate(heads)})
    epsilon = self._epsilon(len(labels), groups)
    delta = float(self.delta)
    grid = build_grid(variants, labels, self.risk, epsilon)
    best, bound = choose(grid, self.risk, self.method, epsilon, delta)
    entry = self._entry(grid, best, bound, variants, (epsilon, delta))
    if best is None:
      needed = risk.least_rows(self.risk, self.method, epsilon, delta, groups)
      entry['rows_needed'] = needed
    entry['accuracy'] = self._accuracies(variants, labels, grid, best)
    self.note = f'{emptiness(entry)}.{about_rows(entry)}'
    if len(grid.thresholds) == 1:
      self.note = f'has no choice: {NO_CHOICE}.{about_rows(entry)}'
    elif best is not None:
      self.note = f'says: {words(entry)}'
    temperatures = file.temperatures(heads[0])
    self.store(entry, parameters, temperatures)
    results = {n: entry[n] for n in self.METRICS if entry.get(n) is not None}
    if heads[0] > 1:
      return results
    # Without exits `tau` is always 1: what was chosen is a field of the model.
    results = {n: x for n, x in results.items() if n not in ('tau', 'early')}
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
    before, sources = kept.get(self.source), {**kept, self.source: entry}
    self._check_weaker(entry, before)
    saved = [c['saved'] for c in old.get('sources', {}).values()]
    if before:
      self.note += f' (In place of the old one, {_summary(before)}.)'
    elif not same and max(saved, default=0.0) > entry['saved']:
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

  def _check_weaker(self, entry: Any, old: Any) -> None:
    """Raises WeakerError if one promises less than the old one."""
    if self.replace or old is None or not old['saved']:
      return
    is_weaker = any(entry[n] > old.get(n, 1) for n in ('epsilon', 'delta'))
    is_weaker |= old.get('method') != entry['method'] == 'conformal'
    is_weaker |= entry['risk'] not in (
      old['risk'],
      *risk.IMPLIED_BY[old['risk']],
    )
    why = _summary(entry)
    if needed := entry.get('rows_needed'):
      why = (
        f'{entry["rows"]} rows certify nothing, at least {needed} are needed'
      )
    elif not is_weaker:
      return
    name = f'certificate_{self.column}' if self.column else 'certificate'
    source = f' of source {self.source!r}' if self.source else ''
    raise WeakerError(
      f'{name}: the old certificate{source} stays, {_summary(old)}, as the new '
      f'one promises less: {why}; --config.evals.{name}.replace=true takes it'
    )

  def collect(
    self, field: str, variables: Any, outputs: Any, **options: Any
  ) -> dict[str, np.ndarray]:
    """See the base; leaves out known rows, and of copies all but the first."""
    rows = super().collect(field, variables, outputs, **options)
    if not self._inputs:
      return rows
    own = [self._inputs[index] for index in rows['index']]
    new = [n for n, one in enumerate(own) if one not in self.known]
    first = {own[n]: n for n in reversed(new)}
    known, copies = len(own) - len(new), len(new) - len(first)
    self.left_out = {'known': known, 'copies': copies}
    if not new:
      raise InvalidDataError(
        f'{self.place(field)}: the run was trained on, or calibrated with, '
        f'rows with the inputs of all {known} rows; give others'
      )
    return {name: x[sorted(first.values())] for name, x in rows.items()}

  def rows_left(self) -> dict[str, Any]:
    """Returns what an entry says of its rows; see `about_rows`."""
    return {
      'left_out': self.left_out,
      'unchecked': self.unchecked,
      'group': self.data.get('group', ''),
    }

  @functools.cached_property
  def _inputs(self) -> list[bytes]:
    return heads.inputs_of(self.splits['split'].source)

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

  def _accuracies(self, variants, labels, grid, best) -> list[float]:
    """Returns the accuracies of the last head as trained and of a setting."""
    chosen, tau = variants[0], np.inf
    if best is not None:
      chosen, tau = variants[grid.variants[best]], grid.thresholds[best]
    exits = Confidence(tau).first(chosen.logits)
    served = chosen.logits[exits, np.arange(len(labels))]
    return [
      float((logits.argmax(-1) == labels).mean())
      for logits in (variants[0].logits[-1], served)
    ]

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
      **self.rows_left(),
      'of': self.place(),
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
