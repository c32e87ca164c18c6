"""Single sentences of an EAT report: what survives, where they exit."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eat import exits
from eat.model import EatClassifier
from eval_lib.text_pages import Sentence
from launch.eat_report.models import Model
from launch.eat_report.sweeps import Setting


def sentences(
  setting: Setting, rows: Sequence[int], labels: np.ndarray
) -> list[Sentence]:
  """Rows of the split as pictures; the pruning is that of the model."""
  if not rows:
    return []
  model = setting.model
  places = positions(model, rows)
  return [
    _sentence(setting, row, labels[row], places[number])
    for number, row in enumerate(rows)
  ]


def positions(model: Model, rows: Sequence[int]) -> list[dict[int, np.ndarray]]:
  """Places of the tokens that are left after each pruning, for each row."""
  batch = model.run.records.records(np.array(rows))
  variables = {
    'params': model.run.variables['params'],
    **model.run.variables['model_state'],
  }

  def run(module: EatClassifier, tokens: Any, types: Any, length: Any):
    state = module.embed(tokens, types, length)
    places, first = {}, 1
    for layer in module.prune_layers:
      state = module.encode(state, first, layer).tokens
      places[layer] = state.positions, state.length
      first = layer + 1
    return places

  traced = jax.jit(
    lambda variables, *arrays: model.module.apply(
      variables, *arrays, method=run
    )
  )
  arrays = batch['tokens'], batch['token_types'], batch['length']
  found = jax.device_get(traced(variables, *arrays))
  return [
    {
      layer: place[number, : length[number]]
      for layer, (place, length) in found.items()
    }
    for number in range(len(rows))
  ]


def _sentence(
  setting: Setting, row: int, label: Any, places: dict[int, np.ndarray]
) -> Sentence:
  """Only what was run: nothing is pruned at the exit or behind it."""
  model, info = setting.model, setting.model.run.task.info
  last = int(setting.exits[row])
  logits = model.logits[: last + 1, row]
  if info.class_names:
    temperatures = model.temperatures[: last + 1]
    values = exits.probabilities(logits[:, None], temperatures)[:, 0]
    truth = info.class_names[int(label)]
  else:
    values, truth = logits, f'{float(label):.2f}'
  layers = model.heads[: last + 1]
  tokens = model.run.records.record(int(row))['tokens']
  return Sentence(
    names=model.run.words.names(tokens.tolist()),
    pruned={k: v for k, v in places.items() if k < layers[-1]},
    heads=dict(zip(layers, values, strict=True)),
    class_names=info.class_names,
    truth=truth,
  )


def pick(setting: Setting, labels: np.ndarray, count: int) -> list[int]:
  """Rows worth looking at: of every exit, answered right and wrong.

  Those of median length come first, then shorter and longer ones.
  """
  chosen: list[int] = []
  length = setting.model.length
  wrong = np.zeros(len(length), bool)
  if setting.chosen.shape[1] > 1:
    wrong = setting.chosen.argmax(-1) != labels
  groups = [
    np.flatnonzero((setting.exits == head) & (wrong == is_wrong))
    for is_wrong in (False, True)
    for head in range(len(setting.model.heads))
  ]
  ranked = [rows[np.argsort(length[rows], kind='stable')] for rows in groups]
  for share in (0.5, 0.2, 0.8, 0.35, 0.65):
    for rows in ranked:
      if len(rows):
        chosen.append(int(rows[int(share * (len(rows) - 1))]))
  return list(dict.fromkeys(chosen))[:count]
