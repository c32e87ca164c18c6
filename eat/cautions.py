"""What whoever starts a service should be told, a line each."""

from collections.abc import Iterator, Mapping
from typing import Any

from dataset_lib.glue_tasks import REPEATED_TEXTS
from eat import exits
from eat.calibration_file import mend, path_in
from eat.policy import EatPolicy
from eat.serving import EatChain


def cautions(
  calibration: Mapping[str, Any],
  policy: EatPolicy,
  chain: EatChain,
  directory: str,
  step: int | None,
  longest: int,
  guaranteed: bool = False,
) -> tuple[str, ...]:
  """What could not be checked, or does not do what was probably meant.

  Args:
    calibration: see `eat.calibration_file.read_calibration`.
    policy: of the service.
    chain: its model.
    directory: of the run.
    step: of the checkpoint.
    longest: tokens of the longest row that was calibrated.
    guaranteed: whether the threshold is to be the certified one.
  """
  return (
    *_of_calibration(calibration, policy, chain, directory, step),
    *_of_lengths(calibration, policy, longest),
    *_of_rule(policy, chain),
    *(_of_guarantee(calibration, policy) if guaranteed else ()),
  )


def _of_calibration(
  calibration: Mapping[str, Any],
  policy: EatPolicy,
  chain: EatChain,
  directory: str,
  step: int | None,
) -> Iterator[str]:
  repair = mend(directory, step, calibration)
  if calibration and 'parameters' not in calibration:
    yield (
      f'{path_in(directory)} does not say of which checkpoint it is: if not of '
      f'this one, temperatures and thresholds are wrong; {repair}'
    )
  if policy.monitor.drift is None:
    what = 'has no statistics for it' if calibration else 'is not there'
    yield (
      'no drift check: a regression has no confidences'
      if not policy.class_names
      else f'no drift check: {path_in(directory)} {what}; {repair}'
    )
  elif len(chain.variants) > 1:
    sources = ', '.join(sorted(policy.settings.minimum_retention))
    yield (
      f'no drift check of rows that are served without pruning ({sources}): '
      'the calibration split was measured with it'
    )


def _of_lengths(
  calibration: Mapping[str, Any], policy: EatPolicy, longest: int
) -> Iterator[str]:
  if calibration and policy.max_length < longest:
    yield (
      f'texts are cut off after {policy.max_length} tokens, those of the '
      f'calibration after {longest}: temperatures and drift check may not fit'
    )


def _of_rule(policy: EatPolicy, chain: EatChain) -> Iterator[str]:
  rule, is_regression = policy.settings.rule, not policy.class_names
  needed = exits.heads_needed(rule, is_regression)
  early = chain.num_stages - 1
  if needed is None or needed <= early:
    return
  if early == 0:
    why = 'the model has no head before its last layer'
  else:
    who = 'a regression' if is_regression else f'rule={rule.name}'
    why = (
      f'{who} with patience={rule.patience} waits for {needed} heads, and '
      f'{early} are before the last layer (at '
      f'{", ".join(map(str, chain.heads[:-1]))})'
    )
  yield f'no row will ever leave early: {why}'


def _of_guarantee(
  calibration: Mapping[str, Any], policy: EatPolicy
) -> Iterator[str]:
  if policy.settings.rule.name == 'never':
    yield (
      'no row will leave early: calibration could certify no threshold; give '
      'it more rows, or a larger epsilon'
    )
  if calibration.get('dataset', {}).get('task') in REPEATED_TEXTS:
    yield (
      'the rows that the threshold was certified on share texts, and the '
      'certificate assumes independent rows: the bound may fail more often '
      'than its delta says'
    )
