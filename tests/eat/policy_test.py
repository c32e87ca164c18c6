"""Policy of EAT: inputs, thresholds, labels, exit reasons."""

import concurrent.futures
import math
import types

import numpy as np
import pytest

from dataset_lib import tokenizer
from eat.chain import EatChain
from eat.policy import ExitPolicy
from halting.row_rules import Confidence, Entropy, Tolerance
from serve_lib.chain import InputError, Row
from serve_lib.items import TextReader
from tests.eat import small
from tests.eat.calibrated import VOCABULARY

CLASSES = ('no', 'maybe', 'yes')
SURE, UNSURE = [9.0, 0.0, 0.0], [0.1, 0.0, 0.0]


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text(VOCABULARY)
  return tokenizer.load(path)


def make(words, classes=CLASSES, num_texts=None, **fields):
  model, variables = small.build(num_classes=max(len(classes), 1))
  reader = TextReader(words, 16, 100, num_texts)
  chain = EatChain(model, variables)
  return ExitPolicy(chain, reader, classes, (16,), **fields)


def a_row(policy, item, logits):
  """A row that has passed as many heads as there are logits."""
  row = Row(policy.encode(item), 16, concurrent.futures.Future(), 0.0, 0.0)
  row.outputs = [
    {'logits': np.array(one, np.float32), 'kept': np.int32(3)} for one in logits
  ]
  return row


def decide(policy, rows):
  return policy.decide(len(rows[0].outputs) - 1, rows, {}).tolist()


PAIR = [2, 4, 3, 5, 3]


@pytest.mark.parametrize(
  ('num_texts', 'item', 'tokens'),
  [
    (None, 'w0 w1', [2, 4, 5, 3]), (None, ('w0', 'w1'), PAIR),
    (None, {'text': b'w0', 'pair': 'w1', 'source': 'news'}, PAIR),
    (2, ('w0', 'w1'), PAIR), (1, {'text': 'w0', 'pair': None}, [2, 4, 3]),
    (2, {'text': 'w0'}, r"pair: expected a second text.*: \{'text'"),
    (1, ('w0', 'w1'), 'pair: expected none.* on single texts'),
  ],
)  # fmt: skip
def test_a_text_a_pair_and_a_mapping(words, num_texts, item, tokens):
  policy = make(words, num_texts=num_texts)
  if isinstance(tokens, str):
    with pytest.raises(InputError, match=tokens):
      policy.encode(item)
    return
  encoded = policy.encode(item)
  assert encoded.inputs['tokens'].tolist() == tokens
  types = [0, 0, 0, 1, 1] if tokens == PAIR else [0] * len(tokens)
  assert encoded.inputs['token_types'].tolist() == types
  if isinstance(item, dict):
    assert encoded.context['source'] == item.get('source', '')


@pytest.mark.parametrize(
  ('item', 'message'),
  [
    ('', 'text: expected at least one readable token'),
    (' \t\n', 'text: expected at least one readable token'),
    ('\x00\x01\x02', 'text: expected at least one readable token'),
    (b'\xff\xfe\x00', 'text: expected UTF-8'),
    ('\ud800', 'text: expected UTF-8, got .*surrogates not allowed'),
    ('w' * 101, 'text: expected at most 100 characters, got 101'),
    (None, 'item: expected a text'),
    (7, 'item: expected a text'),
    ({'txt': 'w0'}, "item: expected a text, a pair of texts, or a mapping"),
    ({'text': 'w0', 'lang': 'en'}, 'also lang'),
    ({'text': 'w0', 'source': 3}, 'source: expected a name, got number'),
    ({'text': 'w0', 'pair': 3}, 'pair: expected a text, got number'),
    (('', 'w0'), 'text: expected at least one readable token'),
    (('w0', ' '), 'pair: expected at least one readable token'),
    (InputError('line: not JSON'), 'line: not JSON'),
  ],
)  # fmt: skip
def test_a_bad_item_says_what_is_wrong(words, item, message):
  with pytest.raises(InputError, match=message):
    make(words).encode(item)


def test_a_model_that_prunes_nothing_takes_no_minimum(words):
  policy = make(words)
  policy.chain.variants = ('unpruned',)
  with pytest.raises(InputError, match='expected none: the model prunes no'):
    policy.encode({'text': 'w0', 'minimum_retention': 0.9})


def test_long_texts_and_typed_separators(words):
  policy = make(words)
  assert policy.encode('[SEP] w0').length > 3
  for count, truncated in ((20, True), (14, False)):
    encoded = policy.encode(' '.join(['w0'] * count))
    assert encoded.length == 16
    assert encoded.context['truncated'] is truncated
    assert encoded.inputs['tokens'][-1] == 3  # [SEP]


@pytest.mark.parametrize(
  ('rule', 'threshold', 'logits', 'expected'),
  [
    (Confidence(0.9), 1.0, SURE, [True, False]),
    # Entropies above 1 are thresholds like others.
    (Entropy(0.01), 1.09, [1.0, 0.5, 0.0], [False, True]),
  ],
)
def test_rows_leave_by_their_source(words, rule, threshold, logits, expected):
  policy = make(words, rule=rule, thresholds={'forum': threshold})
  items = [{'text': 'w0', 'source': source} for source in ('', 'forum')]
  rows = [a_row(policy, item, [logits]) for item in items]
  assert decide(policy, rows) == expected


@pytest.mark.parametrize('bad', [math.nan, math.inf])
@pytest.mark.parametrize('classes', [CLASSES, ()])
def test_logits_that_are_not_finite_are_refused(words, bad, classes):
  policy = make(words, classes=classes)
  one = SURE[: max(len(classes), 1)]
  for logits in ([one, [bad, *one[1:]]], [[bad, *one[1:]], one]):
    with pytest.raises(FloatingPointError, match='logits: expected finite'):
      policy.answer(a_row(policy, 'w0', logits))
  assert policy.monitor.snapshot()['depth'] == {}


def test_temperature_is_applied_before_the_threshold(words):
  policy = make(words, temperatures=(30.0, 1.0, 1.0))
  assert decide(policy, [a_row(policy, 'w0', [SURE])]) == [False]
  assert decide(policy, [a_row(policy, 'w0', [SURE, SURE])]) == [True]


def test_the_answer_names_depth_label_and_reason(words):
  policy = make(words)
  early = a_row(policy, 'w0 w1 w2 w3', [SURE])
  decide(policy, [early])
  answer = policy.answer(early)
  assert (answer.label, answer.fields['depth']) == ('no', 1)
  assert answer.fields['exit_reason'] == 'confidence'
  assert answer.fields['retention'] == 3 / 6
  share = np.exp(9) / (np.exp(9) + 2)
  np.testing.assert_allclose(answer.probabilities['no'], share, rtol=1e-6)
  late = policy.answer(a_row(policy, 'w0', [UNSURE, UNSURE, UNSURE]))
  assert (late.fields['depth'], late.fields['exit_reason']) == (4, 'last layer')


def test_low_margin_answers_average_the_heads(words):
  logits = [[0.0, 2.0, 0.0], [0.0, 2.0, 0.0], [0.1, 0.0, 0.0]]
  plain, ensemble = make(words), make(words, ensemble_margin=0.2)
  assert plain.answer(a_row(plain, 'w0', logits)).label == 'no'
  assert ensemble.answer(a_row(ensemble, 'w0', logits)).label == 'maybe'


def test_a_regression_answers_a_number(words):
  policy = make(words, classes=(), rule=Tolerance(0.5))
  row = a_row(policy, 'w0', [[1.0], [1.2]])
  assert decide(policy, [row]) == [True]
  answer = policy.answer(row)
  assert answer.label == pytest.approx(1.2)
  assert answer.probabilities == {}
  assert answer.fields['exit_reason'] == 'tolerance'
  last = policy.answer(a_row(policy, 'w0', [[1.0], [2.0], [3.0]]))
  assert last.fields['exit_reason'] == 'last layer'
  reasons = policy.monitor.snapshot()['reasons']
  assert reasons == {'tolerance': 1, 'last layer': 1}


def test_during_drift_rows_run_to_full_depth(words):
  compared = []
  drift = types.SimpleNamespace(drifted=True, add=compared.append, report=dict)
  policy = make(words, minimum_retention={'forum': 1.0})
  policy.monitor.drift = drift
  row = a_row(policy, 'w0', [SURE])
  assert decide(policy, [row]) == [False]
  row.outputs = row.outputs * 3
  assert policy.answer(row).fields['exit_reason'] == 'full depth'
  # The depth that ran is counted, not that of the rule.
  assert policy.monitor.snapshot()['depth'] == {4: 1}
  assert len(compared) == 1
  # A row that keeps all tokens is not compared with those that do not.
  kept = {'text': 'w0 w1 w2 w3 w4 w5', 'source': 'forum'}
  policy.answer(a_row(policy, kept, [SURE] * 3))
  assert len(compared) == 1
  drift.drifted = False
  assert decide(policy, [a_row(policy, 'w0', [SURE])]) == [True]
