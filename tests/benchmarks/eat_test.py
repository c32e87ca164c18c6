"""The report of an EAT and its rules by hand; `eat_runs_test` has tiny runs."""

import numpy as np
import pytest

from benchmarks import eat, eat_pictures, pictures, recorded_runs
from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder
from eat.chain import EatChain
from eat.model import EatClassifier
from eat.policy import ExitPolicy
from halting import row_rules
from tests.benchmarks.command_test import parse
from tests.eat import small

# Confidences of 0.9, 0.6 and 0.9 at the first head; the last is always sure.
LOGITS = np.log(
  [
    [[0.9, 0.1], [0.4, 0.6], [0.1, 0.9]],
    [[0.99, 0.01], [0.99, 0.01], [0.99, 0.01]],
  ]
)
LABELS = np.array([0, 0, 1])


def fake(logits, labels, heads=(2, 4), variant='', fitted=None, task=''):
  """A model without a run: rows of 10 tokens, 7 of them left after layer 2.

  A row that leaves at a head costs 10 for each layer, 15 as it is served.
  """
  logits = np.asarray(logits, np.float32)
  rows, classes = logits.shape[1:]
  own = dict(prune_layers=(2,), prune_ratios=(0.4,), exit_layers=heads)
  fields = small.FIELDS | own | {'num_classes': classes}
  chain = EatChain(EatClassifier(**fields), {})
  names = tuple('abc'[:classes]) if classes > 1 else ()
  data = builder.build(
    {'name': 'parity', 'length': 10, 'test_examples': rows},
    split='test', train=False, seed=0, batch_size=1, num_threads=0,
  )  # fmt: skip
  model = recorded_runs.Model(
    name='EAT', facts={'workdir': '/run'}, task=task, data=data,
    policy=ExitPolicy(chain, chain.reader, names, (16,)),
    records={'label': np.asarray(labels), 'length': np.full(rows, 10)},
    fitted=np.zeros(rows, bool) if fitted is None else fitted,
    variant=variant, logits=logits,
    observed=np.resize([[7], [6], [8]], (rows, 1)),
  )  # fmt: skip
  depth = np.tile(heads, (rows, 1))
  model.cost['flops'] = 10.0 * depth
  return model


def measured(model, tau=0.9):
  """Settings by name; a row of the dense model costs 80."""
  full = np.full(model.logits.shape[1], 80.0)
  return recorded_runs.measure(model, full, tau)


def test_rules_by_hand():
  settings = measured(fake(LOGITS, LABELS), tau=0.73)
  exits = {
    'never': [1, 1, 1], 'patience=1': [0, 0, 0], 'confidence=0.73': [0, 1, 0],
    # H(0.9) = 0.325 and H(0.6) = 0.673 nats; margins 0.8 and 0.2.
    'entropy=0.3466': [0, 1, 0], 'entropy=0.2079': [1, 1, 1],
    'margin=0.1': [0, 0, 0], 'margin=0.7': [0, 1, 0],
  }  # fmt: skip
  assert {k: settings[k].point.exits.tolist() for k in exits} == exits
  assert 'patience=2' not in settings


@pytest.mark.parametrize('flag', ['dense', 'student'])
def test_all_runs_have_the_rows_of_the_eat(flag, monkeypatch):
  def load(name, *arguments, **rows):
    return fake(LOGITS, LABELS if name == 'EAT' else 1 - LABELS)

  monkeypatch.setattr(recorded_runs, 'load', load)
  line = f'eat --workdir=/run --out=o --{flag}=/other'
  with pytest.raises(ConfigError, match='a run on the same 3 rows') as caught:
    recorded_runs.sweep(parse(line))
  assert caught.value.field == f'--{flag}'


def test_choosing_settings_to_time():
  settings = measured(fake(LOGITS, LABELS))
  settings |= measured(fake(LOGITS, LABELS, variant='prune_0'))
  auto = recorded_runs.choose(settings, 'auto', 'confidence=0.9')
  assert [one.name for one in auto[:2]] == ['never', 'confidence=0.9']
  # On the frontier: all leave at once (2 of 3 right), or two of them (all).
  assert {(one.point.flops, one.point.quality) for one in auto} == {
    (0.25, 2 / 3), (80 / 240, 1.0), (0.5, 2 / 3),
  }  # fmt: skip
  assert not any('prune_0' in one.name for one in auto)
  for text, wanted in (
    ('all', list(settings)), ('none', [one.name for one in auto]),
    ('prune_0/never,never,never', ['prune_0/never', 'never']),
  ):  # fmt: skip
    chosen = recorded_runs.choose(settings, text, 'confidence=0.9')
    assert [one.name for one in chosen] == wanted
  with pytest.raises(ConfigError) as caught:
    recorded_runs.choose(settings, 'never,x', 'never')
  assert caught.value.field == '--time'


def test_a_setting_by_hand():
  settings = measured(fake(LOGITS, LABELS))
  one = settings['confidence=0.8']
  assert one.point.exits.tolist() == [0, 1, 0]
  # Right, right, and right where the full model is wrong.
  assert one.point.quality == 1
  assert one.point.agreement == pytest.approx(2 / 3)
  assert one.point.flops == pytest.approx(80 / 240)
  row = eat.setting_row(one, settings['never'])
  assert (row['rule'], row['value']) == ('confidence', 0.8)
  assert (row['exit_2'], row['early']) == (pytest.approx(2 / 3),) * 2
  assert (row['depth'], row['retention']) == pytest.approx((8 / 3, 2.7 / 3))
  # The reference is right in two of three rows.
  assert row['quality_difference'] == pytest.approx(100 / 3)


def test_an_ablation_is_over_seeds(tmp_path):
  numbers = {
    'dense/never': (1.0, 0.0), 'exits0/confidence=0.9': (0.5, -1.0),
    'exits1/confidence=0.9': (0.6, -3.0), 'exits2/confidence=0.9': (0.4, 0.5),
    'window0/never': (0.9, -0.5), 'never': (0.8, 0.0),
  }  # fmt: skip
  rows = [
    dict(setting=n, variant='as trained', flops_share=f, quality_difference=q)
    for n, (f, q) in numbers.items()
  ]
  rows.append(dict(setting='prune_0/never', variant='prune ratios x 0'))
  found = eat_pictures.ablation(rows)
  assert [*found] == ['dense', 'exits', 'window']
  flops, quality = found['exits'].values()
  assert flops == pytest.approx((50, 40, 60))
  assert quality == (-1.0, -3.0, 0.5)
  pictures.plot_bars(tmp_path / 'bars', found, 'x')
  assert (tmp_path / 'bars.png').stat().st_size


def test_rules_of_a_regression_and_of_one_head():
  numbers = [[[1.0], [2.0], [3.0]], [[1.05], [2.5], [3.0]]]
  regression = fake(np.array(numbers), LABELS)
  settings = measured(regression)
  assert {one.rule.name for one in settings.values()} == {'tolerance', 'never'}
  assert recorded_runs.default_name(regression, 0.9) == 'tolerance=0.1'
  row = eat.setting_row(settings['tolerance=0.1'], settings['never'])
  assert row['rule'] == 'tolerance'
  assert row['agreement'] == pytest.approx(1)
  assert eat_pictures.short(settings['tolerance=0.1'].rule) == '±0.1'
  certified = [row_rules.Confidence(tau) for tau in (0.46328, 0.8996, 0.9)]
  labels = [*map(eat_pictures.short, (*certified, row_rules.Patience(1)))]
  assert labels == ['P≥0.463', 'P≥0.8996', 'P≥0.9', 'patience=1']
  alone = fake(LOGITS[:1], LABELS, heads=(4,))
  assert list(measured(alone)) == [recorded_runs.default_name(alone, 0.9)]
  never = measured(alone)['never']
  assert eat.setting_row(never, never)['agreement'] is None


def test_tasks_with_two_metrics_have_both():
  labels = np.array([1, 1, 0])
  never = measured(fake(LOGITS, labels, task='qqp'))['never']
  row = eat.setting_row(never, never)
  # All rows are called 0: one is right, and no 1 is found.
  found = row['quality'], row['f1'], row['accuracy']
  assert found == pytest.approx((0, 0, 1 / 3))
  numbers = np.tile([[[3.0], [1.0], [2.0]]], (2, 1, 1))
  stsb = fake(numbers, np.array([2.0, 0.0, 4.0]), task='stsb')
  never = measured(stsb)['never']
  row = eat.setting_row(never, never)
  assert row['quality'] == row['pearson'] == pytest.approx(0.5)
  assert row['spearman'] == pytest.approx(0.5)
  never = measured(fake(LOGITS, LABELS))['never']
  assert 'f1' not in eat.setting_row(never, never)


def test_calibration_of_each_source_with_enough_rows():
  logits, labels = two_heads(0.5)
  source = np.array(['news'] * 200 + ['forum'] * 150 + [''] * 50)
  fitted = np.arange(400) == 210  # leaves 149 rows of a forum
  model = fake(logits, labels, fitted=fitted)
  model.records['source'] = source
  rows = eat.calibration_rows(model)
  found = [(row['source'], row['layer'], row['rows']) for row in rows]
  assert found == [
    ('all', 2, 399), ('all', 4, 399), ('news', 2, 200), ('news', 4, 200)
  ]  # fmt: skip
  alone = fake(logits[:, :200], labels[:200])
  for row, wanted in zip(rows[2:], eat.calibration_rows(alone), strict=True):
    assert row == wanted | {'source': 'news'}


def test_retention_by_layer():
  model = fake(LOGITS, LABELS)
  setting = measured(model)['confidence=0.8']
  rows = eat.retention_rows(setting)
  assert [row['layer'] for row in rows] == [0, 1, 2, 3, 4]
  assert [row['scheduled'] for row in rows] == pytest.approx([1, 1, *[0.6] * 3])
  # 7, 6 and 8 of 10 tokens; only the second row runs layers 3 and 4.
  assert [row['observed'] for row in rows] == pytest.approx([1, 1, *[0.7] * 3])
  assert (rows[0]['p75'], rows[4]['p75']) == pytest.approx((1, 0.75))
  shares = [row['rows_share'] for row in rows]
  assert shares == pytest.approx([1, 1, 1, 1 / 3, 1 / 3])


def two_heads(noise):
  """Logits `[2, 400, 2]` whose heads differ by noise, and labels."""
  rng = np.random.default_rng(0)
  first = rng.standard_normal((400, 2)).astype(np.float32)
  second = first + noise * rng.standard_normal((400, 2)).astype(np.float32)
  labels = np.random.default_rng(1).integers(2, size=400)
  return np.stack([first, second]), labels


def guaranteed(model):
  line = 'eat --workdir=w --out=o --epsilon=.05 --delta=.3 --draws=10'
  return eat.guarantee(model, [model], parse(line))


def test_the_guarantee_counts_judged_rows_only():
  logits, labels = two_heads(0.5)
  fitted = np.arange(400) < 100
  some = guaranteed(fake(logits, labels, fitted=fitted))
  assert some == guaranteed(fake(logits[:, 100:], labels[100:]))
  assert {row['rows'] for row in some} == {300}
  same, labels = two_heads(0.0)
  for row in guaranteed(fake(same, labels)):
    found = row['exceeded'], row['worst'], row['early']
    assert found == (0, 0, 0 if row['method'] == 'CATs' else 1)
  for model in (
    fake(logits, labels, fitted=fitted | True),
    fake(logits[:1], labels, heads=(4,)),
    fake(logits[..., :1], labels),
  ):
    with pytest.raises(InvalidDataError, match='--guarantee: expected exits'):
      guaranteed(model)
