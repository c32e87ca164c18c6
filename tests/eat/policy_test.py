"""What EAT is asked and answers: inputs, thresholds, reasons, monitoring."""

import concurrent.futures
import math

import numpy as np
import pytest

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from eat import exits, service
from eat.exits import Rule
from eat.policy import EatPolicy
from eat.serving import EatChain
from eat.settings import Settings
from serve_lib.chain import InputError, Row
from serve_lib.drift import Calibration, DriftCheck
from serve_lib.monitor import Monitor
from tests.eat import small

WORDS = [f'w{number}' for number in range(40)]
CLASSES = ('no', 'maybe', 'yes')


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
  return tokenizer.load(path)


def make(words, monitor=None, classes=CLASSES, num_texts=None, **settings):
  model, variables = small.build(num_classes=max(len(classes), 1))
  chain = EatChain(model, variables)
  monitor = monitor or Monitor()
  return EatPolicy(
    chain, words, classes, 16, Settings(**settings), monitor, num_texts
  )


def a_row(policy, item, logits):
  """A row that has passed as many heads as there are logits."""
  row = Row(policy.encode(item), 16, concurrent.futures.Future(), 0.0, 0.0)
  row.outputs = [
    {'logits': np.array(one, np.float32), 'kept': np.int32(3)} for one in logits
  ]
  return row


def decide(policy, rows):
  return policy.decide(len(rows[0].outputs) - 1, rows, {}).tolist()


SURE, UNSURE = [9.0, 0.0, 0.0], [0.1, 0.0, 0.0]


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
    make(words, max_characters=100).encode(item)


def test_the_number_of_texts_is_that_of_the_task(words):
  pairs, singles = make(words, num_texts=2), make(words, num_texts=1)
  assert pairs.encode(('w0', 'w1')).length == 5
  assert singles.encode({'text': 'w0', 'pair': None}).length == 3
  with pytest.raises(InputError, match='pair: expected a second text, got n'):
    pairs.encode({'text': 'w0'})
  with pytest.raises(InputError, match='pair: expected none, got a second'):
    singles.encode(('w0', 'w1'))


def test_a_typed_separator_is_no_separator(words):
  assert make(words).encode('[SEP] w0').length > 3


def test_a_long_text_is_truncated_and_says_so(words):
  policy = make(words)
  long = policy.encode(' '.join(['w0'] * 20))
  assert long.length == 16
  assert long.context['truncated']
  assert not policy.encode(' '.join(['w0'] * 14)).context['truncated']


def test_rows_leave_by_their_own_source(words):
  policy = make(
    words, rule=Rule('confidence', tau=0.9), thresholds={'forum': 1.0}
  )
  rows = [
    a_row(policy, {'text': 'w0', 'source': source}, [logits])
    for source, logits in (('', SURE), ('', UNSURE), ('forum', SURE))
  ]
  assert decide(policy, rows) == [True, False, False]


@pytest.mark.parametrize(
  ('settings', 'key', 'expected'),
  [
    (dict(rule=Rule('confidence', tau=0.9), thresholds={'forum': 1.5}),
     'thresholds.forum', 'a probability in [0, 1], or inf for never'),
    (dict(rule=Rule('entropy', tau=0.1), thresholds={'forum': -1.0}),
     'thresholds.forum', 'nats >= 0, or -inf for never'),
    (dict(rule=Rule('confidence', tau=0.9), thresholds={'forum': math.nan}),
     'thresholds.forum', 'a probability in [0, 1], or inf for never'),
    (dict(rule=Rule('patience'), thresholds={'forum': 0.9}),
     'thresholds', 'confidence, entropy, margin, combined'),
    (dict(rule=Rule('never'), thresholds={'forum': 0.9}),
     'thresholds', "none with the rule 'never'"),
    (dict(minimum_retention={'forum': 1.5}),
     'minimum_retention.forum', 'a number in [0, 1]'),
    (dict(classes=(), thresholds={'forum': 0.9}),
     'thresholds', 'none for a regression'),
    (dict(temperatures=(1.0, 2.0)), 'temperatures', '3, one for each head'),
  ],
)  # fmt: skip
def test_illegal_settings_are_named_at_the_start(
  words, settings, key, expected
):
  with pytest.raises(ConfigError) as error:
    make(words, **settings)
  assert error.value.key == key
  assert expected in error.value.expected


def test_entropies_above_1_are_thresholds_like_others(words):
  rule = Rule('entropy', tau=0.01)
  policy = make(words, rule=rule, thresholds={'forum': 1.09})
  rows = [
    a_row(policy, {'text': 'w0', 'source': source}, [[1.0, 0.5, 0.0]])
    for source in ('', 'forum')
  ]
  assert decide(policy, rows) == [False, True]


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
  policy = make(words, minimum_retention={'forum': 0.9, 'news': 0.1})
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
  plain, ensemble = make(words), make(words, ensemble_margin=0.2)
  assert plain.answer(a_row(plain, 'w0', logits)).label == 'no'
  assert ensemble.answer(a_row(ensemble, 'w0', logits)).label == 'maybe'


def test_a_regression_answers_a_number(words):
  policy = make(words, classes=(), rule=Rule('patience', tolerance=0.5))
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


def test_a_regression_leaves_by_its_tolerance_whatever_the_rule(words):
  policy = make(words, classes=(), rule=Rule('confidence', tau=0.9))
  row = a_row(policy, 'w0', [[1.0], [1.05]])
  assert decide(policy, [row]) == [True]
  assert policy.answer(row).exit_reason == 'tolerance'


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


def draw_logits(seed, count):
  rng = np.random.default_rng(seed)
  return [[rng.uniform(0.0, 8.0), 0.0, 0.0] for _ in range(count)]


def draw_rows(policy, count, *sources):
  """Rows like those of the calibration split, of the sources in turn."""
  for number, logits in enumerate(draw_logits(1, count)):
    source = sources[number % len(sources)]
    item = {'text': 'w0 w1 w2 w3 w4 w5', 'source': source}
    yield a_row(policy, item, [logits] * 3)


@pytest.mark.parametrize(
  'settings',
  [
    dict(thresholds={'forum': 0.99}),
    dict(rule=Rule('confidence', tau=0.9, veto_margin=0.99)),
    dict(rule=Rule('confidence', tau=0.97)),
    dict(rule=Rule('entropy', tau=0.2)),
    dict(rule=Rule('patience')),
    dict(rule=Rule('never')),
  ],
)
def test_drift_is_none_where_only_the_rule_differs(words, settings):
  confidences = exits.softmax(np.array(draw_logits(0, 2000))).max(-1)
  normal = Calibration(confidences, 0.9)
  drift = DriftCheck(normal, window=256, every=64, confirm=1)
  policy = make(words, monitor=Monitor(drift=drift), **settings)
  for row in draw_rows(policy, 640, '', 'forum'):
    passed, row.outputs = row.outputs, row.outputs[:1]
    if not decide(policy, [row])[0]:
      row.outputs = passed
    policy.answer(row)
  report = drift.report()
  assert report['tests'] > 5
  assert not report['drifted']
  assert report['distance'] < 0.1
  assert report['psi'] < 0.1


def test_rows_that_keep_all_tokens_are_not_compared_with_those_that_do_not(
  words,
):
  normal = Calibration(np.linspace(0.5, 1.0, 50), 0.9)
  drift = DriftCheck(normal, window=20, every=1)
  policy = make(
    words, monitor=Monitor(drift=drift), minimum_retention={'forum': 1.0}
  )
  for row in draw_rows(policy, 40, 'forum'):
    policy.answer(row)
  assert drift.report()['tests'] == 0
  for row in draw_rows(policy, 40, ''):
    policy.answer(row)
  assert drift.report()['tests'] > 0


@pytest.mark.parametrize(
  ('options', 'key'),
  [
    ({'rule': 'confidense'}, 'serve.rule'),
    ({'tau': -1.0}, 'serve.tau'),
    ({'tau': 'sure'}, 'serve.tau'),
    ({'patience': 0}, 'serve.patience'),
    ({'tauu': 0.9}, 'serve.tauu'),
    ({'tau': 'guaranteed'}, 'serve.tau'),
    ({'rule': 'margin', 'tau': 1.5}, 'serve.tau'),
    ({'rule': 'margin'}, 'serve.tau'),
    ({'rule': 'entropy'}, 'serve.tau'),
    ({'rule': 'combined'}, 'serve.tau'),
  ],
)
def test_illegal_options_are_named(options, key):
  from dataset_lib.fields import check_fields

  with pytest.raises(ConfigError) as error:
    service.rule_of(check_fields(options, service.OPTIONS, 'serve'), {})
  assert error.value.key == key


def test_the_guaranteed_threshold_is_the_certified_one():
  given = {name: field.default for name, field in service.OPTIONS.items()}
  given['tau'] = 'guaranteed'
  certified = {'guarantee': {'threshold': 0.97}}
  assert service.rule_of(given, certified).tau == 0.97
  given['rule'], given['tau'] = 'patience', None
  assert service.rule_of(given, certified).tau is None
  given['rule'], given['tau'] = 'confidence', 'guaranteed'
  nothing = {'guarantee': {'threshold': None}}
  assert service.rule_of(given, nothing).name == 'never'
