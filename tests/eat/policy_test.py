"""Policy of EAT: inputs, thresholds, labels, exit reasons."""

import math

import numpy as np
import pytest

from eat import exits
from eat.exits import Rule
from serve_lib.chain import InputError
from serve_lib.drift import Calibration, DriftCheck
from serve_lib.monitor import Monitor
from tests.eat.policies import CLASSES, SURE, UNSURE, a_row, decide, make


def test_a_text_a_pair_and_a_mapping(words):
  policy = make(words)
  assert policy.encode('w0 w1').inputs['tokens'].tolist() == [2, 4, 5, 3]
  pair = policy.encode(('w0', 'w1')).inputs
  assert pair['tokens'].tolist() == [2, 4, 3, 5, 3]
  assert pair['token_types'].tolist() == [0, 0, 0, 1, 1]
  same = policy.encode({'text': b'w0', 'pair': 'w1', 'source': 'news'})
  assert same.inputs['tokens'].tolist() == [2, 4, 3, 5, 3]
  assert same.context['source'] == 'news'


@pytest.mark.parametrize(
  ('item', 'message'),
  [
    ('', 'text: expected at least one readable token'),
    (' \t\n', 'text: expected at least one readable token'),
    ('\x00\x01\x02', 'text: expected at least one readable token'),
    (b'\xff\xfe\x00', 'text: expected UTF-8'),
    ('\ud800', 'text: '),
    ('w' * 101, 'text: expected at most 100 characters, got 101'),
    (None, 'item: expected a text'),
    (7, 'item: expected a text'),
    ({'txt': 'w0'}, "item: expected a text, a pair of texts, or a mapping"),
    ({'text': 'w0', 'lang': 'en'}, r"also \['lang'\]"),
    ({'text': 'w0', 'source': 3}, 'source: expected a name, got int'),
    ({'text': 'w0', 'pair': 3}, 'pair: expected a text, got int'),
    (('', 'w0'), 'text: expected at least one readable token'),
    (('w0', ' '), 'pair: expected at least one readable token'),
    (InputError('line: not JSON'), 'line: not JSON'),
  ],
)  # fmt: skip
def test_a_bad_item_says_what_is_wrong(words, item, message):
  with pytest.raises(InputError, match=message):
    make(words).encode(item)


def test_the_number_of_texts_is_that_of_the_task(words):
  pairs, singles = make(words, num_texts=2), make(words, num_texts=1)
  assert pairs.encode(('w0', 'w1')).length == 5
  assert singles.encode({'text': 'w0', 'pair': None}).length == 3
  with pytest.raises(InputError, match='pair: expected a second text, got n'):
    pairs.encode({'text': 'w0'})
  with pytest.raises(InputError, match='pair: expected none, got a second'):
    singles.encode(('w0', 'w1'))


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
    (Rule('confidence', tau=0.9), 1.0, SURE, [True, False]),
    # Entropies above 1 are thresholds like others.
    (Rule('entropy', tau=0.01), 1.09, [1.0, 0.5, 0.0], [False, True]),
  ],
)
def test_rows_leave_by_their_own_source(
  words, rule, threshold, logits, expected
):
  policy = make(words, rule=rule, options={'thresholds': {'forum': threshold}})
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


def test_suspicious_sources_keep_their_tokens(words):
  policy = make(
    words, options={'minimum_retention': {'forum': 0.9, 'news': 0.1}}
  )
  variants = [
    policy.encode({'text': 'w0 w1 w2 w3 w4 w5', 'source': s}).variant
    for s in ('forum', 'news', '')
  ]
  assert variants == ['full', 'pruned', 'pruned']


def test_the_answer_names_depth_label_and_reason(words):
  policy = make(words)
  early = a_row(policy, 'w0 w1 w2 w3', [SURE])
  decide(policy, [early])
  answer = policy.answer(early)
  assert (answer.label, answer.depth, answer.exit_reason) == (
    'no', 1, 'confidence',
  )  # fmt: skip
  assert answer.retention == 3 / 6
  np.testing.assert_allclose(
    answer.probabilities['no'], np.exp(9) / (np.exp(9) + 2), rtol=1e-6
  )
  late = policy.answer(a_row(policy, 'w0', [UNSURE, UNSURE, UNSURE]))
  assert (late.depth, late.exit_reason) == (4, 'last layer')


def test_low_margin_answers_average_the_heads(words):
  logits = [[0.0, 2.0, 0.0], [0.0, 2.0, 0.0], [0.1, 0.0, 0.0]]
  plain, ensemble = make(words), make(words, options={'ensemble_margin': 0.2})
  assert plain.answer(a_row(plain, 'w0', logits)).label == 'no'
  assert ensemble.answer(a_row(ensemble, 'w0', logits)).label == 'maybe'


@pytest.mark.parametrize('rule', ['patience', 'confidence'])
def test_a_regression_answers_a_number(words, rule):
  policy = make(words, classes=(), rule=Rule(rule, tau=0.9, tolerance=0.5))
  row = a_row(policy, 'w0', [[1.0], [1.2]])
  assert decide(policy, [row]) == [True]
  answer = policy.answer(row)
  assert answer.label == pytest.approx(1.2)
  assert answer.probabilities == {}
  assert answer.exit_reason == 'tolerance'
  last = policy.answer(a_row(policy, 'w0', [[1.0], [2.0], [3.0]]))
  assert last.exit_reason == 'last layer'
  assert policy.monitor.snapshot()['reasons'] == {
    'tolerance': 1,
    'last layer': 1,
  }


# -- drift


def test_drift_sends_everything_to_full_depth_and_ends(words):
  draw = np.random.default_rng(0)

  def sure():
    return [draw.uniform(3.0, 9.0), 0.0, 0.0]

  confidences = [
    float(exits.softmax(np.array(sure(), np.float32)).max()) for _ in range(500)
  ]
  normal = Calibration(np.array(confidences), 0.9)
  drift = DriftCheck(normal, window=50, every=10, confirm=1, recover=1)
  policy = make(words, monitor=Monitor(drift=drift))

  def serve(logits, count):
    reasons = []
    for _ in range(count):
      row = a_row(policy, 'w0', [logits()])
      if not decide(policy, [row])[0]:
        row.outputs = row.outputs * 3
      reasons.append(policy.answer(row).exit_reason)
    return reasons

  assert set(serve(sure, 100)) == {'confidence'}
  serve(lambda: [3.2, 0.0, 0.0], 100)  # confident, but not as before
  assert policy.monitor.full_depth
  before = policy.monitor.snapshot()['depth']
  assert serve(sure, 1) == ['full depth']
  # What ran is counted, not what the rule would have asked for.
  after = policy.monitor.snapshot()['depth']
  assert after == before | {4: before.get(4, 0) + 1}
  serve(sure, 200)
  assert not policy.monitor.full_depth
  assert serve(sure, 1) == ['confidence']


def test_rows_that_keep_all_tokens_are_not_compared_with_those_that_do_not(
  words,
):
  drift = DriftCheck(
    Calibration(np.linspace(0.5, 1.0, 50), 0.9), window=20, every=1
  )
  policy = make(
    words,
    monitor=Monitor(drift=drift),
    options={'minimum_retention': {'forum': 1.0}},
  )
  for source in ('forum', ''):
    item = {'text': 'w0 w1 w2 w3 w4 w5', 'source': source}
    for share in np.linspace(0.0, 8.0, 40):
      policy.answer(a_row(policy, item, [[share, 0.0, 0.0]] * 3))
    assert (drift.report()['tests'] > 0) == (source == '')
