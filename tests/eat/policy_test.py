"""What EAT is asked and answers: inputs, thresholds, reasons, monitoring."""

import concurrent.futures

import numpy as np
import pytest

from dataset_lib import tokenizer
from eat import exits, service
from eat.exits import Rule
from eat.policy import EatPolicy, Settings
from eat.serving import EatChain
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


def make(words, monitor=None, classes=CLASSES, **settings):
  model, variables = small.build(num_classes=max(len(classes), 1))
  chain = EatChain(model, variables)
  monitor = monitor or Monitor()
  return EatPolicy(chain, words, classes, 16, Settings(**settings), monitor)


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
    (InputError('line: not JSON'), 'line: not JSON'),
  ],
)  # fmt: skip
def test_a_bad_item_says_what_is_wrong(words, item, message):
  with pytest.raises(InputError, match=message):
    make(words, max_characters=100).encode(item)


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


def test_drift_sends_everything_to_full_depth_and_ends(words):
  draw = np.random.default_rng(0)

  def sure():
    return [draw.uniform(3.0, 9.0), 0.0, 0.0]

  confidences = [
    float(exits.softmax(np.array(sure(), np.float32)).max()) for _ in range(500)
  ]
  normal = Calibration.of(np.array(confidences), np.ones(500, np.int64))
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
  assert serve(sure, 1) == ['full depth']
  serve(sure, 200)
  assert not policy.monitor.full_depth
  assert serve(sure, 1) == ['confidence']


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
  ],
)
def test_illegal_options_are_named(options, key):
  from dataset_lib.errors import ConfigError
  from dataset_lib.fields import check_fields

  with pytest.raises(ConfigError) as error:
    service.rule_of(check_fields(options, service.OPTIONS, 'serve'), {})
  assert error.value.key == key


def test_the_guaranteed_threshold_is_the_certified_one():
  given = {name: field.default for name, field in service.OPTIONS.items()}
  given['tau'] = 'guaranteed'
  certified = {'guarantee': {'threshold': 0.97}}
  assert service.rule_of(given, certified).tau == 0.97
  nothing = {'guarantee': {'threshold': None}}
  assert service.rule_of(given, nothing).name == 'never'
