"""What ALBERT with halting is asked and answers."""

import concurrent.futures
import math

import numpy as np
import pytest

from albert_act.policy import AlbertPolicy
from albert_act.serving import AlbertChain
from dataset_lib import tokenizer
from serve_lib.chain import InputError, Row
from serve_lib.monitor import Monitor
from tests.albert_act import small

WORDS = [f'w{number}' for number in range(30)]
CLASSES = ('no', 'maybe', 'yes')
LOGITS = [2.0, 0.0, 1.0]
LENGTH = 16


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
  return tokenizer.load(path)


def make(words, classes=CLASSES, **settings):
  chain = AlbertChain(*small.build(num_classes=max(len(classes), 1)))
  return AlbertPolicy(chain, words, classes, LENGTH, Monitor(), **settings)


def a_row(policy, item, steps, logits=LOGITS, running=False):
  """A row after a stage; behind its tokens there is padding."""
  row = Row(policy.encode(item), LENGTH, concurrent.futures.Future(), 0.0, 0.0)
  padded = np.zeros(LENGTH, np.int32)
  padded[: len(steps)] = steps
  row.outputs = [
    {'logits': np.array(logits, np.float32), 'running': np.bool_(running),
     'steps': padded}
  ]  # fmt: skip
  return row


def test_a_text_a_pair_and_a_mapping(words):
  policy = make(words)
  plain = policy.encode('w0 w1')
  assert plain.inputs['tokens'].tolist() == [2, 4, 5, 3]
  assert (plain.length, plain.variant) == (4, 'compacted')
  pair = policy.encode(('w0', 'w1')).inputs
  assert pair['tokens'].tolist() == [2, 4, 3, 5, 3]
  assert pair['token_types'].tolist() == [0, 0, 0, 1, 1]
  same = policy.encode({'text': b'w0', 'pair': 'w1', 'source': 'news'}).inputs
  assert same['tokens'].tolist() == [2, 4, 3, 5, 3]


@pytest.mark.parametrize(
  ('item', 'message'),
  [
    ('', 'text: expected at least one readable token'),
    (b'\xff\xfe\x00', 'text: expected UTF-8'),
    ('w' * 101, 'text: expected at most 100 characters, got 101'),
    (None, 'item: expected a text'),
    (('w0', ' '), 'pair: expected at least one readable token'),
  ],
)
def test_a_bad_item_says_what_is_wrong(words, item, message):
  with pytest.raises(InputError, match=message):
    make(words, max_characters=100).encode(item)


def test_the_number_of_texts_is_that_of_the_task(words):
  with pytest.raises(InputError, match='pair: expected a second text'):
    make(words, num_texts=2).encode('w0')
  with pytest.raises(InputError, match='pair: expected none'):
    make(words, num_texts=1).encode(('w0', 'w1'))


def test_rows_leave_when_every_token_has_halted(words):
  policy = make(words)
  running = np.array([True, False, True, False])
  left = policy.decide(0, [], {'running': running, 'logits': None})
  assert left.tolist() == [False, True, False, True]


def test_the_answer_names_label_depth_and_reason(words):
  policy = make(words)
  answer = policy.answer(a_row(policy, 'w0 w1 w2', [5, 1, 2, 4, 3]))
  assert (answer.label, answer.depth, answer.exit_reason) == (
    'no', 5, 'all tokens halted',
  )  # fmt: skip
  assert answer.iterations == 3.0
  assert answer.tokens == ('[CLS]', 'w0', 'w1', 'w2', '[SEP]')
  assert answer.token_iterations == (5, 1, 2, 4, 3)
  weights = np.exp(LOGITS)
  assert list(answer.probabilities) == list(CLASSES)
  np.testing.assert_allclose(
    list(answer.probabilities.values()), weights / weights.sum(), rtol=1e-6
  )
  assert not answer.truncated
  late = policy.answer(a_row(policy, 'w0', [6, 1, 2]))
  assert (late.depth, late.exit_reason) == (6, 'last iteration')
  found = policy.monitor.snapshot()
  assert found['depth'] == {5: 1, 6: 1}
  assert found['reasons'] == {'all tokens halted': 1, 'last iteration': 1}
  # Shares of the six iterations: 3 and (6 + 1 + 2) / 3.
  assert found['retention']['p50'] == pytest.approx(0.5)


def test_a_long_text_is_truncated_and_says_so(words):
  policy = make(words)
  row = a_row(policy, ' '.join(['w0'] * 20), [2] * 16)
  answer = policy.answer(row)
  assert answer.truncated
  assert len(answer.token_iterations) == 16


def test_a_regression_answers_a_number(words):
  policy = make(words, classes=())
  answer = policy.answer(a_row(policy, 'w0', [2, 2, 2], logits=[1.25]))
  assert answer.label == 1.25
  assert answer.probabilities == {}


def test_large_logits_do_not_overflow(words):
  policy = make(words)
  answer = policy.answer(a_row(policy, 'w0', [1, 1, 1], [2e4, -2e4, 0.0]))
  assert answer.probabilities == {'no': 1.0, 'maybe': 0.0, 'yes': 0.0}


@pytest.mark.parametrize('bad', [math.nan, math.inf])
@pytest.mark.parametrize('classes', [CLASSES, ()])
def test_logits_that_are_not_finite_are_refused(words, bad, classes):
  policy = make(words, classes=classes)
  logits = [bad, 0.0, 0.0][: max(len(classes), 1)]
  with pytest.raises(FloatingPointError, match='logits: expected finite'):
    policy.answer(a_row(policy, 'w0', [1, 1, 1], logits))
  assert policy.monitor.snapshot()['depth'] == {}


def test_there_is_nothing_to_warn_of(words):
  assert make(words).warnings == ()
