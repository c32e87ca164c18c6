"""The same tests of the engine for every family that is served."""

import concurrent.futures
import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from albert_act import compaction, packed_attention
from albert_act.task import FineTune as AlbertTask
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eat.task import FineTune as EatTask
from model_lib.bert import BertClassifier
from serve_lib import description
from serve_lib.decisions import Prediction
from serve_lib.engine import Engine
from serve_lib.items import TokenReader
from tests.adatape import serving_test as tapes
from tests.albert_act import small as small_albert
from tests.compilations import compilations
from tests.eat import small as small_eat
from tests.serve_lib import toy
from train_lib.task import ServedRun
from train_lib.text_classification import TextClassification

COUNT = 12
LENGTH = 16
NAMES = ('a', 'b', 'c')
TEXTS = DatasetInfo(
  'tokens', (LENGTH,), 'int32', 3, NAMES, 8, vocab_size=40,
  length_buckets=(8, LENGTH),
)  # fmt: skip


@dataclasses.dataclass
class Family:
  """A model, and the same by a plain call of the masked form.

  `serve` returns (chain, policy), new every time; `logits` are `[E, B, O]` of
  the items by all heads, `heads` the head of a prediction; `fields` are those
  of `Prediction.as_dict` beside the common ones.
  """

  serve: Any
  items: list[Any]
  logits: np.ndarray
  heads: Any = lambda prediction: -1
  fields: tuple[str, ...] = ()


def text_family(kind, model, variables, options, **more):
  task = small_eat.task(kind, model, TEXTS, dataset={'name': 'fake_text'})
  rows = small_eat.rows(COUNT, low=2, high=LENGTH, vocab_size=40)
  tokens, types, lengths = small_eat.batch(rows, LENGTH)
  logits, out = jax.jit(model.apply)(variables, tokens, 0 * types, lengths)
  serve = functools.partial(task.serve, variables, options)
  items = [{'tokens': row.tolist()} for row in rows]
  exits = np.asarray(out.get('exits', logits[None]))
  return Family(serve, items, exits, **more)


def bert():
  model, variables = small_eat.randomly(BertClassifier(
    num_classes=3, width=16, depth=2, mlp_dim=32, num_heads=2, vocab_size=40,
    max_positions=64,
  ))  # fmt: skip
  return text_family(
    TextClassification, model, variables, {}, fields=('truncated',)
  )


def eat(build=small_eat.build):
  model, variables = build(vocab_size=40, exit_mean=True)
  layers = model.heads()
  return text_family(
    EatTask, model, variables, {'tau': 0.8},
    heads=lambda prediction: layers.index(prediction.fields['depth']),
    fields=('depth', 'retention', 'truncated'),
  )  # fmt: skip


def albert():
  model, variables = small_albert.build(num_classes=3)
  return text_family(
    AlbertTask, model, variables, {'iterations': 3},
    fields=('depth', 'iterations', 'token_iterations', 'truncated'),
  )  # fmt: skip


def adatape(model, data):
  task, variables = tapes.build(model, tapes.DATA[data])
  items = tapes.items_of(task, COUNT)
  batch = {task.info.input_key: np.stack(items)}
  logits, _ = jax.jit(task.apply)(variables['params'], {}, batch)
  serve = functools.partial(task.serve, variables, {})
  logits = np.asarray(logits)[None]
  return Family(serve, items, logits, fields=('tape_length',))


FAMILIES = {
  'bert': bert,
  'eat': eat,
  'albert': albert,
  'adatape': functools.partial(adatape, tapes.IMAGE, 'image'),
  'adatape parity': functools.partial(adatape, tapes.PARITY, 'tokens'),
  'eat modernbert': functools.partial(eat, small_eat.build_modern),
}


*DEFAULT, _, _ = FAMILIES
SERVED = [
  pytest.param(name, marks=() if name in DEFAULT else pytest.mark.nightly)
  for name in FAMILIES
]


@pytest.fixture(scope='module', params=SERVED)
def served(request):
  """(family, engine) with few programs."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compaction, 'SHARES', (0.5, 1.0))
    patch.setattr(compaction, 'FEW_TOKENS', (8,))
    patch.setattr(packed_attention, 'SHARES', (1.0,))
    family = FAMILIES[request.param]()
    chain, policy = family.serve()
    with Engine(chain, policy, policy.lengths, (1, 4), backend='xla') as engine:
      yield family, engine


def test_it_describes_itself_with_an_item_that_it_answers(served):
  _, engine = served
  about = description.about(engine, 'run')
  assert all(':' in about[name] for name in ('model', 'task'))
  sample = about['example']['POST /predict']
  answer = engine.predict([sample])[0]
  assert isinstance(answer, Prediction) or 'image' in sample


def with_programs_of(engine, **settings):
  """Another engine with the compiled programs of one."""
  other = Engine(
    engine._programs.chain, engine.policy, engine.grid.lengths,
    engine.grid.batches, backend='xla', **settings,
  )  # fmt: skip
  other._programs.__dict__ = engine._programs.__dict__
  other._programs.compile = lambda *_: engine._warm_up
  other.warm_up()
  return other


def check(family, index, answer):
  assert isinstance(answer, Prediction), answer
  logits = family.logits[family.heads(answer), index]
  expected = np.exp(logits - logits.max())
  got = list(answer.probabilities.values())
  np.testing.assert_allclose(got, expected / expected.sum(), atol=1e-4)
  assert answer.label == max(answer.probabilities, key=answer.probabilities.get)


def check_all(family, engine, order=range(COUNT)):
  answers = engine.predict([family.items[index] for index in order])
  for index, answer in zip(order, answers, strict=True):
    check(family, index, answer)


def test_alone_batched_and_in_any_order(served):
  family, engine = served
  with compilations() as compiled:
    check_all(family, engine)
    check_all(family, engine, np.random.default_rng(0).permutation(COUNT))
    for index in (0, COUNT - 1):
      check(family, index, engine.submit(family.items[index]).result(20))
  assert not compiled


def test_in_any_bucket(served):
  family, engine = served
  chain, policy = family.serve()
  longest = policy.lengths[-1:]
  with Engine(chain, policy, longest, (COUNT,), backend='xla') as other:
    other._programs._compiled = engine._programs._compiled
    check_all(family, other)


@pytest.mark.parametrize(
  'requests', [25, pytest.param(1250, marks=pytest.mark.nightly)]
)
def test_mixed_requests_from_eight_threads(served, requests):
  family, engine = served
  items = [*family.items, {'tokens': [-1]}, None]

  def ask(seed):
    choice = np.random.default_rng(seed).integers(0, len(items), requests)
    answers = other.stream(items[index] for index in choice)
    for index, answer in zip(choice, answers, strict=True):
      if index < COUNT:
        check(family, index, answer)
      else:
        assert answer.during == 'encode'

  with (
    with_programs_of(engine, max_pending=64) as other,
    concurrent.futures.ThreadPoolExecutor(8) as threads,
    compilations() as compiled,
  ):
    [*threads.map(ask, range(8))]
  assert not compiled
  status = other.status()
  assert status['pending'] == status['pool_bytes'] == 0
  assert status['peak_pending'] <= 64


def test_an_answer_becomes_json(served):
  family, engine = served
  (answer,) = engine.predict(family.items[:1])
  fields = json.loads(json.dumps(answer.as_dict()))
  common = {'label', 'probabilities', 'exit_reason'}
  assert set(fields) == common | set(family.fields)
  toy.check_schema(engine, fields)


def test_memory_between_stages_is_bounded(served):
  family, engine = served
  widest = engine._programs.widest_bytes
  for limit in (1, widest):
    with with_programs_of(engine, max_pool_bytes=limit) as other:
      check_all(family, other)
    assert other.status()['peak_pool_bytes'] <= widest


def test_a_model_of_one_stage_is_served_with_its_temperature(tmp_path):
  family, file = bert(), tmp_path / 'calibration.json'
  file.write_text('{"temperatures": [2.0]}')
  chain, policy = family.serve(ServedRun(str(tmp_path)))
  with Engine(chain, policy, policy.lengths, (1,), lazy=True) as engine:
    [answer] = engine.predict(family.items[:1])
  check(dataclasses.replace(family, logits=family.logits / 2), 0, answer)
  file.write_text('{"temperatures": [2.0], "parameters": "crc32:0"}')
  with pytest.raises(ConfigError, match='calibration of the checkpoint'):
    family.serve(ServedRun(str(tmp_path)))


def test_padding_of_items_is_a_copy_of_a_row():
  reader = TokenReader(1, 1, 10)
  rows = [{'tokens': np.full(1, n, np.int32)} for n in (5, 6)]
  assert reader.pad(rows, 1, 4)['tokens'].tolist() == [[5], [6], [5], [5]]
  assert reader.pad([], 1, 2)['tokens'].tolist() == [[0], [0]]
