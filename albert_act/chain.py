"""Serving ALBERT with halting: tokens and rows that have halted are removed.

A visit of a stage runs a few iterations with exact compaction
(`albert_act.compaction`). The first stage also embeds, the second is a loop.
After a visit the rows in which every token has halted are answered; the others
come back, in batches with rows at other iterations. If iterations >=
max_iterations there is one stage, in which halted rows cost nothing.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

from albert_act import compaction, host_compaction
from albert_act.compaction import Tokens
from albert_act.model import AlbertClassifier
from albert_act.policy import HaltingPolicy, Options
from core.errors import ConfigError
from serve_lib import classifier
from serve_lib.chain import Resizable, Stage
from serve_lib.items import TOKEN_IDS, TextReader
from serve_lib.loops import Loop

VARIANT = 'compacted'


class AlbertChain(Resizable):
  """An `AlbertClassifier` that halts, as `serve_lib.chain.Chain`.

  A visit runs `iterations` of the model's `limit`. A model of several blocks is
  refused: a halted token would still be needed by the next block. `others` are
  variants with another rule.
  """

  def __init__(
    self,
    model: AlbertClassifier,
    variables: Mapping[str, Any],
    reader: TextReader = TOKEN_IDS,
    iterations: int = 12,
    others: Mapping[str, AlbertClassifier] = types.MappingProxyType({}),
  ):
    if not model.rule.SCORED:
      rule = type(model.rule).__name__
      legal = 'ACT or another rule, as a fixed depth saves nothing'
      raise ConfigError('model.rule', rule, legal)
    for name in ('num_groups', 'inner_group'):
      if (value := getattr(model, name)) != 1:
        raise ConfigError(f'model.{name}', value, '1 to be served')
    # Padding rows have no tokens and halt at once.
    self.reader = dataclasses.replace(reader, padding_tokens=0)
    self.model, self.pad, self.variables = model, self.reader.pad, variables
    self.iterations, self.limit = iterations, model.max_iterations
    visits = -(-self.limit // iterations)
    self.num_stages = min(visits, 2)
    self.loop = Loop(1, visits - 1) if visits > 2 else None
    self.variants = (VARIANT, *others)
    self._models = {VARIANT: model, **others}
    runs = self._begin, self._iterate
    self._stages = {
      name: [functools.partial(module.apply, method=run) for run in runs]
      for name, module in self._models.items()
    }

  def sized(
    self, index: int, variant: str, sizes: Any, alone: bool = False
  ) -> Stage:
    """Returns the pure function of a stage, whatever the sizes.

    Outputs are `'logits'` float32 `[B, O]`, `'running'` bool `[B]`, True
    while a token of the row has not halted, and `'steps'` int32 `[B, L]`.
    """
    return self._stages[variant][index]

  def programs(
    self, variant: str, sizes: Any, alone: bool, inputs: Any, compile: Any
  ) -> Any:
    """Returns the programs of the stages; see `serve_lib.chain.Resizable`."""
    model = self._models[variant]
    both = host_compaction.stages(model, self.iterations, inputs, compile)
    return both[: self.num_stages]

  def _begin(self, module: AlbertClassifier, carry: Any) -> Any:
    inputs = (carry[name] for name in ('tokens', 'token_types', 'length'))
    return self._iterate(module, compaction.begin(module, *inputs))

  def _iterate(self, module: AlbertClassifier, tokens: Tokens) -> Any:
    sizes = compaction.sizes_for(*tokens.valid.shape)
    tokens = compaction.iterate(module, tokens, self.iterations, sizes)
    logits, _ = module.classify(tokens.x[:, 0])
    running, steps = tokens.halting.running.any(1), tokens.halting.steps
    return tokens, {'logits': logits, 'running': running, 'steps': steps}


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Any:
  """Serves halting with compaction; options: `albert_act.policy.Options`."""
  chosen = classifier.read_options(Options, options)
  lengths = classifier.text_lengths(task, run.lengths)
  reader = classifier.text_reader(task, lengths[-1], chosen.max_characters)

  def chain(variables: Any, others: Any) -> AlbertChain:
    return AlbertChain(task.model, variables, reader, chosen.iterations, others)

  policy = functools.partial(HaltingPolicy, rule=repr(task.model.rule))
  return classifier.with_files(
    task, run, chosen.setting, VARIANT, lengths, chain, policy
  )
