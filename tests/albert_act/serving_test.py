"""Serving ALBERT: compacted equals masked; options, policy, answers."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import compaction, packed_attention
from albert_act.chain import AlbertChain
from albert_act.policy import HaltingPolicy
from albert_act.task import FineTune
from core.errors import ConfigError
from dataset_lib import tokenizer
from dataset_lib.source import DatasetInfo
from halting.token_rules import ACT, Fixed, StraightThrough
from serve_lib.chain import Grid, Group, InputError, Row
from serve_lib.items import TextReader
from serve_lib.loops import Loop
from tests.albert_act import small
from tests.eat import small as small_eat
from tests.eat.calibrated import VOCABULARY
from train_lib.task import ServedRun


@pytest.fixture(scope='module', autouse=True)
def few_sizes():
  """Each size is compiled for every program: few show what all would."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compaction, 'SHARES', (0.25, 0.5, 1.0))
    patch.setattr(compaction, 'FEW_TOKENS', (16,))
    patch.setattr(packed_attention, 'SHARES', (0.5, 1.0))
    yield


@functools.cache
def apply_of(model):
  return jax.jit(model.apply)


def in_xla(chain, index, carry, variant='compacted'):
  stage = jax.jit(chain.stage(index, variant, 24))
  return stage(chain.variables, carry)


def rows_of(chain, count, size):
  texts = small_eat.rows(count, low=1, high=24, vocab_size=40)
  return chain.pad(list(map(small_eat.item, texts)), 24, size)


def carry_iterations(carry):
  return carry['iteration'] if isinstance(carry, dict) else carry.iteration


def check(chain, variables, count, run=in_xla, size=8):
  """Runs all stages with rows of padding; compares with the masked form.

  Every other row comes to the loop an iteration before the rest of its batch.
  """
  batch = rows_of(chain, count, size)
  carry, outputs = run(chain, 0, batch)
  if chain.loop:
    later = jax.tree.map(np.array, carry)
    early, _ = run(chain, 1, carry)
    is_early = np.arange(size) % 2 == 1

    def joined(one, other):
      return np.where(is_early.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

    carry = jax.tree.map(joined, early, later)
    assert len({*carry_iterations(carry).tolist()}) == min(size, 2)
  for _ in range(chain.loop.visits if chain.loop else chain.num_stages - 1):
    carry, outputs = run(chain, 1, carry)
  assert not outputs['running'].any()
  batch['tokens'] = np.minimum(batch['tokens'], chain.model.vocab_size - 1)
  logits, out = apply_of(chain.model)(
    variables, *map(jnp.asarray, batch.values())
  )
  steps = outputs['steps']
  np.testing.assert_allclose(
    outputs['logits'][:count], logits[:count], atol=1e-5
  )
  np.testing.assert_array_equal(steps[:count], out['ponder']['steps'][:count])
  assert not steps[count:].any()  # padding rows


@pytest.mark.parametrize(
  ('rule', 'iterations'),
  [
    (ACT(), 2),
    pytest.param(StraightThrough(), 4, marks=pytest.mark.nightly),
    (small.PONDER, 4),
    pytest.param(ACT(), 1, marks=pytest.mark.nightly),
  ],
)
def test_compacted_form_equals_masked_form(rule, iterations):
  model, variables = small.build(rule=rule)
  chain = AlbertChain(model, variables, iterations=iterations)
  assert chain.loop == {1: Loop(1, 5), 2: Loop(1, 2), 4: None}[iterations]
  check(chain, variables, 7)


@dataclasses.dataclass(frozen=True)
class Late(ACT):
  """Halts after three steps at the earliest: it reads more than the sum."""

  def step(self, state, evidence, is_last):
    """See the base."""
    early = jnp.where(state.steps < 2, 0.01, evidence)
    return super().step(state, early, is_last)


@pytest.mark.parametrize(
  'rule', [ACT(), StraightThrough(), small.PONDER, Late()]
)
def test_packed_by_the_host_equals_masked_form(rule):
  pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
  from serve_lib.onnx.program import OnnxStages

  model, variables = small.build(rule=rule)
  chain = AlbertChain(model, variables, iterations=2)
  programs = OnnxStages(chain, Grid((24,), (8,)))

  def run(chain, index, carry):
    return programs.run(Group(index, 'compacted', 24), 1, carry)

  for count in (1, 7):
    check(chain, variables, count, run, count)
  others = {'more': model.clone(rule=dataclasses.replace(rule, epsilon=0.6))}
  more = AlbertChain(model, variables, others=others)
  programs, batch = OnnxStages(more, Grid((24,), (8,))), rows_of(more, 4, 4)
  _, found = programs.run(Group(0, 'more', 24), 4, batch)
  _, expected = in_xla(more, 0, batch, 'more')
  np.testing.assert_allclose(found['logits'], expected['logits'], atol=1e-5)
  np.testing.assert_array_equal(found['steps'], expected['steps'])


def test_contents_of_padding_are_never_read():
  model, variables = small.build()
  # A token id that does not exist has an embedding of NaN.
  unknown = type('Unknown', (TextReader,), {'pad_id': model.vocab_size})
  chain = AlbertChain(model, variables, unknown(None, 512))
  check(chain, variables, 3)


def test_halted_tokens_are_not_computed():
  # Their states are poisoned; nothing reads them but as keys and values, which
  # were made before.
  model, variables = small.build()
  halted = jnp.arange(9)[None] >= jnp.array([3, 1, 1, 5])[:, None]

  def run(module, inputs):
    tokens = compaction.begin(module, *inputs)
    running = tokens.halting.running & ~halted
    tokens = dataclasses.replace(
      tokens,
      x=jnp.where(halted[:, :, None], jnp.nan, tokens.x),
      halting=tokens.halting.replace(running=running),
    )
    return compaction.iterate(module, tokens, 2, (10, 36))

  tokens = model.apply(variables, small.batch(), method=run)
  finite = np.isfinite(np.asarray(tokens.x)).all(2)
  np.testing.assert_array_equal(finite, ~np.asarray(halted))


CLASSES = ('no', 'maybe', 'yes')
LOGITS = [2.0, 0.0, 1.0]
LENGTH = 16


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text(VOCABULARY)
  return str(path)


INFO = DatasetInfo(
  'tokens', (LENGTH,), 'int32', 3, CLASSES, 8, vocab_size=40,
  length_buckets=(8, LENGTH),
)  # fmt: skip


def serve(vocabulary, options=None, lengths=None, **fields):
  model, variables = small.build(num_classes=3, **fields)
  dataset = {'name': 'tests.fakes:FakeText', 'tokenizer': vocabulary}
  task = small_eat.task(FineTune, model, INFO, dataset=dataset)
  return task.serve(variables, options or {}, ServedRun(lengths=lengths))


def test_options_and_lengths_reach_chain_and_policy(vocabulary):
  chain, policy = serve(vocabulary, {'iterations': 2})
  assert policy.lengths == (8, 16)
  assert (chain.iterations, chain.num_stages, chain.reader.pad_id) == (2, 2, 0)
  assert chain.loop == Loop(1, 2)
  assert (policy.class_names, policy.warnings) == (CLASSES, ())
  chain, policy = serve(vocabulary, {'max_characters': 5}, (12, 6))
  assert (policy.lengths, chain.iterations) == ((6, 12), 12)
  with pytest.raises(InputError, match='at most 5 characters'):
    policy.encode('w1 w2 w3')


def test_a_certified_epsilon_is_a_variant():
  model, variables = small.build(num_classes=3)
  halting = model.clone(rule=ACT(0.6))
  chain = AlbertChain(model, variables, iterations=6, others={'more': halting})
  assert chain.variants == ('compacted', 'more')
  batch = chain.pad(list(map(small_eat.item, small_eat.rows(4))), 24, 4)
  masked = apply_of(halting)(variables, *map(jnp.asarray, batch.values()))
  _, found = jax.jit(chain.stage(0, 'more', 24))(chain.variables, batch)
  np.testing.assert_allclose(found['logits'], masked[0], atol=1e-5)
  steps = masked[1]['ponder']['steps']
  np.testing.assert_array_equal(found['steps'], steps)
  # The certificate counts the mean iterations of a row.
  task = small_eat.task(FineTune, model, INFO)
  none, one, two = (model.flops((LENGTH,), n) for n in (0.0, 1.0, 2.0))
  flops = task.row_flops(
    {'ponder': {'steps': jnp.array([[1, 3, 0], [1, 1, 1]])}}
  )
  np.testing.assert_allclose(flops, [two, one], rtol=1e-5)
  assert one > none
  assert {'rule': ACT(0.6)} in task.cheaper()


@pytest.mark.parametrize(
  ('options', 'lengths', 'fields', 'field', 'expected'),
  [
    ({'tau': 0.9}, None, {}, 'serve.tau', 'legal fields are max_characters'),
    ({}, (8, 64), {}, 'lengths', 'from 1 to 16'),
    ({}, None, {'rule': Fixed()}, 'model.rule', 'saves nothing'),
    ({}, None, {'num_groups': 2}, 'model.num_groups', '1 to be served'),
    ({}, None, {'inner_group': 2}, 'model.inner_group', '1 to be served'),
  ],
)
def test_illegal_arguments_are_refused(
  vocabulary, options, lengths, fields, field, expected
):
  with pytest.raises(ConfigError) as error:
    serve(vocabulary, options, lengths, **fields)
  assert error.value.field == field
  assert expected in error.value.expected


@pytest.fixture(scope='module')
def words(vocabulary):
  return tokenizer.load(vocabulary)


def make(words, classes=CLASSES):
  chain = AlbertChain(*small.build(num_classes=max(len(classes), 1)))
  return HaltingPolicy(chain, TextReader(words, LENGTH), classes, (LENGTH,))


def answer_to(policy, item, steps, logits=LOGITS):
  """The answer to a row after its last stage, padded to the length bucket."""
  row = Row(policy.encode(item), LENGTH, concurrent.futures.Future(), 0.0, 0.0)
  padded = np.pad(np.array(steps), (0, LENGTH - len(steps)))
  row.outputs = [{'logits': np.array(logits, np.float32), 'steps': padded}]
  return policy.answer(row)


def test_rows_leave_when_every_token_has_halted(words):
  running = np.array([True, False, True, False])
  left = make(words).decide(0, [], {'running': running, 'logits': None})
  assert left.tolist() == [False, True, False, True]


def test_the_answer_has_label_depth_and_reason(words):
  policy = make(words)
  answer = answer_to(policy, 'w0 w1 w2', [5, 1, 2, 4, 3])
  weights = np.exp(LOGITS)
  shares = dict(zip(CLASSES, weights / weights.sum(), strict=True))
  fields = answer.as_dict()
  assert fields.pop('probabilities') == pytest.approx(shares)
  assert fields == dict(
    label='no', depth=5, exit_reason='all tokens halted', iterations=3.0,
    tokens=('[CLS]', 'w0', 'w1', 'w2', '[SEP]'),
    token_iterations=(5, 1, 2, 4, 3), truncated=False,
  )  # fmt: skip
  late = answer_to(policy, 'w0', [6, 1, 2])
  assert (late.fields['depth'], late.fields['exit_reason']) == (
    6,
    'last iteration',
  )
  found = policy.monitor.snapshot()
  assert found['depth'] == {5: 1, 6: 1}
  assert found['reasons'] == {'all tokens halted': 1, 'last iteration': 1}
  # Shares of the six iterations: 3 and (6 + 1 + 2) / 3.
  assert found['retention']['p50'] == pytest.approx(0.5)
