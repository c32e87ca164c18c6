"""The EAT report on tiny trained runs, against direct recomputation."""

import json

import numpy as np
import pytest

from eat import exits
from eat.exits import Rule
from eval_lib import calibration
from launch import benchmark, peers
from launch.eat_report import models, quality, sentences, sweeps
from model_lib import flops
from tests.launch.eat_report import toy
from tests.launch.eat_report.toy import TEMPERATURES, confidences, read


@pytest.mark.slow
def test_every_file_is_there(made):
  names = {path.name for path in made.iterdir()}
  pictures = (
    'frontier', 'frontier_batch', 'frontier_flops', 'exits', 'retention',
    'reliability_1', 'reliability_2', 'reliability_3', 'ablation', 'sentences',
  )  # fmt: skip
  wanted = {f'{p}.{kind}' for p in pictures for kind in ('png', 'pdf')}
  tables = ('settings', 'timings', 'examples', 'calibration', 'guarantee')
  wanted |= {f'{name}.csv' for name in tables}
  assert names == wanted | {'result.json', 'sentences.html'}


def pruned(tokens):
  """[CLS] and 70 % of the others, rounded up."""
  return 1 + -(-7 * (tokens - 1) // 10)


def flops_by_hand(length, leaves):
  """Of a row of the EAT at a length: too short for windows in blocks."""
  first = pruned(length)
  # Keys and values of a block under a head are there already.
  block = lambda t: flops.block(t, 16, 16) - 4 * t * 16 * 16  # noqa: E731
  short = lambda t: flops.cls_block(t, 16, 16)  # noqa: E731
  head = 2 * 16 * (16 + 2)
  total = short(length) + head
  if leaves >= 1:
    total += block(length) + short(first) + head
  if leaves == 2:
    total += block(first) + short(pruned(first)) + head
  return total


@pytest.mark.slow
def test_rows_are_those_of_the_model(made, direct, tau):
  rows = [r for r in read(made / 'examples.csv')
          if r['setting'] == f'confidence={tau:g}']  # fmt: skip
  assert [int(r['index']) for r in rows] == list(range(24))
  _, records, out = direct
  sure = confidences(direct) >= tau
  seen = set()
  for row, got in enumerate(rows):
    length = int(records['length'][row])
    # The rule, the counts and the FLOPs once more, by hand.
    leaves = 0 if sure[0, row] else 1 if sure[1, row] else 2
    seen.add(leaves)
    first = pruned(length)
    second = pruned(first)
    # Heads and prunings are both after 1 and 2; the head comes first.
    left = (length, first, second)[leaves]
    assert got['kept_1'] == (str(first) if leaves >= 1 else '')
    assert got['kept_2'] == (str(second) if leaves == 2 else '')
    bucket = next(size for size in toy.BUCKETS if size >= length)
    assert int(got['length']) == length
    assert int(got['depth']) == leaves + 1
    assert got['exit_reason'] == ('last layer' if leaves == 2 else 'confidence')
    assert float(got['retention']) == pytest.approx(left / length)
    assert float(got['flops']) == pytest.approx(flops_by_hand(length, leaves))
    served = flops_by_hand(bucket, leaves)
    assert float(got['flops_served']) == pytest.approx(served)
    assert int(got['answer']) == out['exits'][leaves, row].argmax()
    assert int(got['label']) == records['label'][row]
    assert int(got['correct']) == (got['answer'] == got['label'])
  assert len(seen) > 1


@pytest.mark.slow
def test_settings_are_means_of_their_rows(made, tau):
  settings = {r['setting']: r for r in read(made / 'settings.csv')}
  rows = read(made / 'examples.csv')
  timed = [r['setting'] for r in read(made / 'timings.csv')]
  assert {'dense/never', 'again/never', 'never',
          f'confidence={tau:g}'} <= set(timed)  # fmt: skip
  dense = [float(r['flops']) for r in rows if r['setting'] == 'dense/never']
  for name in timed:
    own = [r for r in rows if r['setting'] == name]
    for column, field in (
      ('quality', 'correct'), ('depth', 'depth'), ('retention', 'retention'),
      ('flops', 'flops'), ('flops_served', 'flops_served'),
    ):  # fmt: skip
      mean = np.mean([float(r[field]) for r in own])
      assert float(settings[name][column]) == pytest.approx(mean), name
    share = sum(float(r['flops']) for r in own) / sum(dense)
    assert float(settings[name]['flops_share']) == pytest.approx(share)
  assert float(settings['dense/never']['flops_share']) == pytest.approx(1)
  # Nothing is pruned there, so it costs more than as it was trained.
  variants = {name.partition('/')[0] for name in settings if '/' in name}
  assert variants == {
    'dense', 'again', 'prune_0', 'prune_0.5', 'no_window',
  }  # fmt: skip
  assert float(settings['prune_0/never']['retention']) == 1
  costs = [float(settings[f'{v}never']['flops'])
           for v in ('prune_0/', 'prune_0.5/', '')]  # fmt: skip
  assert costs == sorted(costs, reverse=True)
  assert len(set(costs)) == 3


@pytest.mark.slow
@pytest.mark.peers
def test_other_libraries_run_the_dense_model(runs, tmp_path, capsys):
  for package in peers.PACKAGES['onnx']:
    pytest.importorskip(package)
  flags = ['--time=never', '--rows=7', '--repeats=2', '--batch_size=3',
           '--warmup=1', '--prune_scales=1', '--sentences=0']  # fmt: skip
  where = [f'--workdir={runs["eat"]}', f'--dense={runs["dense"]}']
  assert benchmark.main(['eat', *where, f'--out={tmp_path}', *flags]) == 0
  text = capsys.readouterr().out
  assert 'WARNING' not in text
  assert 'left out' not in text
  timings = {row['setting']: row for row in read(tmp_path / 'timings.csv')}
  assert list(timings) == [
    'dense/never', 'never', 'PyTorch dense', 'ONNX Runtime dense',
  ]  # fmt: skip
  for row in timings.values():
    assert row['differing_rows'] == '0', row['setting']
    assert float(row['latency_mean']) > 0
    assert float(row['throughput']) > 0


@pytest.mark.slow
def test_time_is_measured_and_answers_are_the_recorded_ones(made):
  timings = read(made / 'timings.csv')
  result = json.loads((made / 'result.json').read_text())
  assert result['reference'] == 'dense/never'
  assert {r['setting'] for r in timings} == set(result['speed'])
  for row in timings:
    assert row['differing_rows'] == '0', row['setting']
    assert (row['rows'], row['repeats'], row['batch_size']) == ('10', '2', '2')
    low, mean = float(row['latency_p50']), float(row['latency_mean'])
    assert 0 < low <= float(row['latency_p95'])
    assert mean > 0
    assert float(row['throughput']) > 0
    if row['setting'] == 'dense/never':
      assert float(row['speedup_batch_1']) == 1
  timed = [r for r in read(made / 'examples.csv') if r['latency']]
  assert len(timed) == 10 * len(timings)


@pytest.mark.slow
def test_the_flop_limit_is_that_of_the_lengths_that_are_run(made):
  timings = {r['setting']: r for r in read(made / 'timings.csv')}
  served = dict.fromkeys(timings, 0.0)
  for row in read(made / 'examples.csv'):
    if row['latency']:
      served[row['setting']] += float(row['flops_served'])
  for name, row in timings.items():
    limit = served['dense/never'] / served[name]
    assert float(row['flop_limit']) == pytest.approx(limit)


@pytest.mark.slow
def test_the_guarantee_fails_as_often_as_a_plain_loop_says(made, direct):
  _, records, out = direct
  answers = out['exits'].argmax(-1)
  differs = answers[:2] != answers[2]
  right = answers[2] == records['label']
  sure = confidences(direct)[:2].astype(np.float32)
  result = json.loads((made / 'result.json').read_text())
  guarantee = {r['loss']: r['exceeded'] for r in result['guarantee']}
  # Without the quarter that the temperatures were fitted to.
  assert {row['rows'] for row in result['guarantee']} == {18}
  judged = toy.judged(direct[0])
  differs, right, sure = differs[:, judged], right[judged], sure[:, judged]
  assert guarantee == {
    'disagreement': toy.exceeded_by_loop(sure, differs, 0.3, 0.1, 20),
    'harm': toy.exceeded_by_loop(sure, differs & right, 0.3, 0.1, 20),
  }


@pytest.mark.slow
def test_calibration_is_judged_on_rows_that_it_was_not_fitted_to(made, direct):
  run, records, out = direct
  result = json.loads((made / 'result.json').read_text())
  assert (result['rows'], result['rows_fitted']) == (24, 6)
  assert [r['layer'] for r in result['calibration']] == [1, 2, 3]
  assert result['calibration'][1]['temperature'] == 1.0
  rows = toy.judged(run)
  judged, labels = out['exits'][:, rows], records['label'][rows]
  before = calibration.errors(judged, labels)
  after = calibration.errors(
    judged, labels, temperatures=np.array(TEMPERATURES)
  )
  for place, row in enumerate(result['calibration']):
    assert row['rows'] == 18
    assert row['ece'] == pytest.approx(before[place], abs=1e-4)
    assert row['ece_calibrated'] == pytest.approx(after[place], abs=1e-4)


@pytest.mark.slow
def test_the_fastest_near_the_dense_run(made):
  result = json.loads((made / 'result.json').read_text())
  settings, speed = result['settings'], result['speed']
  least = settings['dense/never']['quality']
  own = [name for name in speed if name not in ('dense/never', 'again/never')]
  assert [row['points'] for row in result['fastest']] == [0.5, 1.0, 2.0]
  for row in result['fastest']:
    near = [
      speed[name]['speedup_batch_1'] for name in own
      if settings[name]['quality'] >= least - row['points'] / 100
    ]  # fmt: skip
    if row['setting'] is None:
      assert not near
    else:
      assert row['speedup_batch_1'] == max(near)


@pytest.mark.slow
def test_sentences_show_the_positions_of_the_model(direct):
  run, records, out = direct
  model = models.record(run, run.task.model, '', np.array(TEMPERATURES))
  labels = models.labels_of(run)
  [setting] = sweeps.measure(
    model, {'never': (Rule('never'), None)}, labels,
    *quality.of(run)[1:],
    models.dense_flops(model),
  )  # fmt: skip
  [one] = sentences.sentences(setting, [3], labels)
  length = int(out['length'][3])
  np.testing.assert_array_equal(one.pruned[2], out['positions'][3, :length])
  assert list(one.pruned) == [1, 2]
  assert [len(places) for places in one.pruned.values()] == out['kept'][
    :, 3
  ].tolist()
  assert one.names[0] == '[CLS]'
  assert one.names[-1] == '[SEP]'
  assert len(one.names) == records['length'][3]
  wanted = exits.probabilities(out['exits'], TEMPERATURES)[:, 3]
  np.testing.assert_allclose(
    np.stack(list(one.heads.values())), wanted, atol=1e-5
  )
  assert list(one.heads) == [1, 2, 3]
  assert one.truth == ('negative', 'positive')[records['label'][3]]
