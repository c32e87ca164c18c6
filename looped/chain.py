"""Serving a looped model: one iteration is a stage that rows come back to.

Rows at different iterations share a batch; a row leaves when its rule halts.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from core import fields, registry
from core.errors import ConfigError
from looped import rules
from looped.model import LoopedModel, evidence
from looped.policy import LoopedPolicy, Options, PuzzleReader
from looped.puzzle import Puzzle, puzzle_of
from looped.rules import AnswerRule
from serve_lib import classifier
from serve_lib.chain import Resizable, Stage
from serve_lib.decisions import GUARANTEED
from serve_lib.loops import Loop

VARIANT, ROWS = 'served', 2  # rows of the check of a rule
_BESIDE = {'setting', 'iterations'}  # options beside a certificate
RULES = {
  'score': 'looped.rules:Score', 'unchanged': 'looped.rules:Unchanged',
  'verified': 'looped.rules:Verified', 'all': 'looped.rules:AllIterations',
}  # fmt: skip


class LoopedChain(Resizable):
  """A `LoopedModel` as `serve_lib.chain.Chain`; `others` have other rules."""

  num_stages = 2

  def __init__(
    self,
    model: LoopedModel,
    variables: Mapping[str, Any],
    reader: PuzzleReader,
    iterations: int = 1,
    others: Mapping[str, LoopedModel] = types.MappingProxyType({}),
  ):
    self.model, self.reader, self.pad = model, reader, reader.pad
    self.variables = {'params': variables['params'], **variables['model_state']}
    self.limit = model.limit or model.max_steps
    self.loop = Loop(1, self.limit, iterations)
    models = {VARIANT: model, **others}
    self.variants = (*models,)
    self._stages = {
      name: (
        functools.partial(module.apply, method=self._begin),
        functools.partial(module.apply, method=self._iterate),
      )
      for name, module in models.items()
    }

  def sized(
    self, index: int, variant: str, sizes: Any, alone: bool = False
  ) -> Stage:
    """Returns a stage: the start, or one iteration.

    Outputs of an iteration, of the attempt that halts first: 'logits' float32
    `[B, 1]` (the score), 'answer' int32 `[B, S]`, 'steps' and 'attempt' int32,
    'running', 'halted' (by the rule) and 'hopeless' bool, 'first' float32
    (score of the first iteration, of the form as typed), all `[B]`.
    """
    return self._stages[variant][index]

  def _begin(self, model: LoopedModel, inputs: Any) -> Any:
    questions = inputs[self.reader.NAME]
    tokens = questions.reshape(-1, questions.shape[-1])
    valid = jnp.ones(tokens.shape[:1], bool)
    carry = {
      'tokens': tokens,
      'state': model.begin(tokens),
      'halting': model.rule.start(valid),
      'hopeless': ~valid,
      'first': jnp.zeros(tokens.shape[:1], jnp.float32),
    }
    return self._by_row(carry), {}

  def _by_row(self, tree: Any) -> Any:
    """Turns rows of attempts `[B * K, ...]` into `[B, K, ...]`."""
    count = self.reader.attempts
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), tree)

  def _iterate(self, model: LoopedModel, carry: Any) -> Any:
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), carry)
    tokens, halting = flat['tokens'], flat['halting']
    state, score = model.advance(flat['state'], tokens)
    seen = evidence(flat['state'], state, score, tokens)
    after, _ = model.rule.step(halting, seen, False)
    halted = ~after.running
    now = halting.running & halted & model.rule.gives_up(after.steps, seen)
    hopeless = flat['hopeless'] | now  # for good, if others go on
    after = after.replace(running=after.running & (after.steps < self.limit))
    score = score.astype(jnp.float32)
    first = jnp.where(halting.steps == 0, score, flat['first'])
    carry = {
      'tokens': tokens, 'state': state, 'halting': after,
      'hopeless': hopeless, 'first': first,
    }  # fmt: skip
    outputs = {
      'logits': score[:, None],
      'answer': seen.answer.astype(jnp.int32),
      'steps': after.steps,
      'running': after.running,
      'halted': halted & ~hopeless,
      'hopeless': hopeless,
      'first': first,
    }
    return self._by_row(carry), self._winner(self._by_row(outputs))

  def _winner(self, outputs: Any) -> Any:
    """Returns the outputs of one attempt of each row `[B, K, ...]`.

    The best by score of the attempts that halted now, else of those that were
    not given up, else of all. 'steps' is the maximum of the attempts.
    """
    halted, scores = outputs['halted'], outputs['logits'][..., 0]
    hopeful = ~outputs['hopeless']
    wins = hopeful | ~hopeful.any(-1, keepdims=True)
    wins = halted | (wins & ~halted.any(-1, keepdims=True))
    attempt = jnp.where(wins, scores, -jnp.inf).argmax(-1).astype(jnp.int32)
    is_best = jnp.arange(self.reader.attempts)[None] == attempt[:, None]

    def best(x: Any) -> Any:
      mask = is_best.reshape(*is_best.shape, *(1,) * (x.ndim - 2))
      # ONNX Runtime selects no booleans.
      wide = x.astype(jnp.int32) if x.dtype == bool else x
      return jnp.where(mask, wide, 0).sum(1).astype(x.dtype)

    running = outputs['running'].any(-1) & ~halted.any(-1)
    return jax.tree.map(best, outputs) | {
      'attempt': attempt,
      'steps': outputs['steps'].max(-1),
      'running': running,
      'first': outputs['first'][:, 0],  # as the certificate's rows
    }


def rule_of(
  options: Options,
  rule_fields: Mapping[str, Any],
  model: LoopedModel,
  puzzle: Puzzle,
) -> Any:
  """Returns the rule that options describe; `rule_fields` are its fields.

  Raises ConfigError for another class, and for fields that it has not.
  """
  kind: Any = type(model.rule)
  values = {} if options.rule else dict(vars(model.rule))
  if options.rule:
    name = RULES.get(options.rule, options.rule)
    legal = f"one of {', '.join(RULES)}, or 'package.module:Class'"
    kind = registry.locate(name, 'serve.rule', AnswerRule, legal)
  stated = {n: getattr(options, n) for n in ('tau', 'give_up', 'patience')}
  values |= {n: v for n, v in stated.items() if v is not None}
  values |= rule_fields
  extra = {'puzzle': puzzle} if 'puzzle' in kind.__dataclass_fields__ else {}
  values = {n: v for n, v in values.items() if n not in extra}
  rule = kind(**fields.check(kind, values, 'serve', [*extra]), **extra)
  check_rule(rule, puzzle.cells)
  return rule


def check_rule(rule: AnswerRule, cells: int) -> None:
  """Raises ConfigError for a rule that JAX cannot run, or of another shape."""
  tokens = jnp.zeros((ROWS, cells), jnp.int32)
  seen = rules.Evidence(jnp.zeros(ROWS), tokens, tokens, tokens)

  def step(seen: Any) -> Any:
    return rule.step(rule.start(seen.score > 0), seen, False)[0]

  try:
    shape = jax.eval_shape(step, seen).running.shape
  except (TypeError, ValueError) as error:  # NumPy, an `if`, other shapes
    shape = str(error).partition('\n')[0]
  if shape != (ROWS,):
    expected = f'a rule whose `stops` returns bool [B] in JAX ({shape})'
    raise ConfigError('serve.rule', registry.name_of(type(rule)), expected)


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Any:
  """Serves a solver; options: `looped.policy.Options`, and `rule.FIELD`."""
  rule_fields = {k[5:]: v for k, v in options.items() if k.startswith('rule.')}
  options = {k: v for k, v in options.items() if not k.startswith('rule.')}
  chosen = classifier.read_options(Options, options)
  if run.lengths is not None:
    raise ConfigError('lengths', run.lengths, 'none for inputs of one size')
  changed = {k for k, v in vars(chosen).items() if v != getattr(Options, k)}
  changed |= {'rule'} if rule_fields else set()
  if chosen.setting == GUARANTEED and (illegal := changed - _BESIDE):
    name = min(illegal)
    legal = 'nothing: the certificate holds for the rule and limit it names'
    raise ConfigError(f'serve.{name}', getattr(chosen, name), legal)
  puzzle = puzzle_of(task.config['dataset'])
  limit = chosen.limit or task.model.limit or task.model.max_steps
  if limit % chosen.iterations:
    expected = f'a divisor of the {limit} iterations'
    raise ConfigError('serve.iterations', chosen.iterations, expected)
  reader = PuzzleReader(1, puzzle, chosen.attempts)
  rule = rule_of(chosen, rule_fields, task.model, puzzle)
  told = repr(rule)
  if chosen.setting == GUARANTEED:
    rule, told = rules.AllIterations(), ''  # it serves during drift

  def chain(variables: Any, others: Any) -> LoopedChain:
    for module in others.values():
      if module.limit not in (0, limit):
        legal = f'{limit}, those of the run; run launch.evaluate again'
        raise ConfigError('iterations of the certificate', module.limit, legal)
    models = {n: module.clone(limit=limit) for n, module in others.items()}
    model = task.model.clone(limit=limit, rule=rule)
    return LoopedChain(model, variables, reader, chosen.iterations, models)

  policy = functools.partial(LoopedPolicy, limit=limit, rule=told)
  return classifier.with_files(
    task, run, chosen.setting, VARIANT, (1,), chain, policy
  )
