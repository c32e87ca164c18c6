"""The EAT report on tiny trained runs, against direct recomputation."""

import argparse
import csv
import json
import pathlib
import random

import jax
import numpy as np
import pytest

from eat import exits
from eat.exits import Rule
from eval_lib.timing import Timings
from launch import benchmark, command_line, peers
from launch.eat_report import command as eat_report
from launch.eat_report import models, report_tables, sentences, sweeps
from launch.eat_report.models import Model
from launch.eat_report.speed import Speed
from model_lib import flops
from train_lib import config_schema, trainer

WORDS = [f'w{number}' for number in range(40)]
SMALL = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.mlp_dim=16', 'model.num_heads=2',
  'model.vocab_size=44', 'model.max_positions=30', 'optimizer.lr=0.01',
  'optimizer.warmup_steps=0',
]  # fmt: skip


def write_data(directory):
  (directory / 'vocab.txt').write_text(
    '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])
  )
  draw = random.Random(0)
  for name, count in (('train', 128), ('dev', 24)):
    rows = []
    for number in range(count):
      # Three quarters of the words tell the class.
      words = [
        draw.choice(WORDS[20 * (number % 2) :][:20])
        if draw.random() < 0.5
        else draw.choice(WORDS)
        for _ in range(draw.randrange(1, 15))
      ]
      rows.append(f'{" ".join(words)}\t{number % 2}')
    text = '\n'.join(['sentence\tlabel', *rows])
    (directory / f'{name}.tsv').write_text(text)


def train(directory, name, root, argument, *changes):
  """A few steps of a tiny model, so that its rows differ."""
  config = command_line.load_config(
    f'{root}/configs/eat/sst2.py:data={directory},vocabulary={directory},'
    f'variant=tiny,batch=16,max_length=16,{argument}',
    [*SMALL, *changes],
  )
  with config.unlocked():
    config.dataset.length_buckets = ()
    config.stages = dict(stage1=dict(steps=60, epochs=0.0, trainable='.*'))
    config.evals = dict(dev=config.evals['dev'])
    config.checkpoint.best_metric = ''
  config_schema.validate(config)
  workdir = directory / name
  trainer.train(config, str(workdir))
  return workdir


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  root = pathlib.Path(__file__).resolve().parents[3]
  directory = tmp_path_factory.mktemp('runs')
  write_data(directory)
  dense = train(directory, 'dense', root, 'model=dense', 'model.depth=2')
  eat = train(
    directory, 'eat', root, 'model=eat', 'model.depth=3',
    'model.prune_layers=(1,2)', 'model.exit_layers=(1,2)', 'model.window=4',
    'loss.exit_weights=(0.3,0.3,1.0)',
  )  # fmt: skip
  (eat / 'calibration.json').write_text(
    json.dumps({'temperatures': TEMPERATURES})
  )
  return {'dense': dense, 'eat': eat}


def read(path):
  with path.open(encoding='utf-8') as file:
    return list(csv.DictReader(file))


TEMPERATURES = (2.0, 1.0, 1.5)


@pytest.fixture(scope='module')
def direct(runs):
  """(run, its rows, what its model says of all of them in one call)."""
  run = models.load('EAT', str(runs['eat']), '', 0, '--workdir')
  records = run.records.records(np.arange(len(run.records)))
  arrays = [records[key] for key in ('tokens', 'token_types', 'length')]
  apply = jax.jit(run.task.model.apply)
  _, out = apply({'params': run.variables['params']}, *arrays)
  return run, records, jax.device_get(out)


def confidences(direct):
  """Of each head and row, calibrated, `[E, N]`."""
  _, _, out = direct
  scaled = out['exits'] / np.array(TEMPERATURES)[:, None, None]
  powers = np.exp(scaled - scaled.max(-1, keepdims=True))
  return (powers / powers.sum(-1, keepdims=True)).max(-1)


@pytest.fixture(scope='module')
def tau(direct):
  """Half of the rows leave at the first head."""
  return round(float(np.median(confidences(direct)[0])), 4)


@pytest.fixture(scope='module')
def made(runs, tau, tmp_path_factory):
  """The directory of a whole report."""
  out = tmp_path_factory.mktemp('report') / 'out'
  code = benchmark.main(
    [
      'eat', f'--workdir={runs["eat"]}', f'--dense={runs["dense"]}',
      f'--ablation=again={runs["dense"]}',
      f'--out={out}', '--rows=10', '--warmup=1', '--repeats=2',
      '--batch_size=2', '--guarantee', '--epsilon=0.3', f'--tau={tau}',
      '--draws=20', '--sentences=3', '--most=2', '--peers=none',
    ]
  )  # fmt: skip
  assert code == 0
  return out


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
    first = 1 + -(-7 * (length - 1) // 10)
    second = 1 + -(-7 * (first - 1) // 10)
    # Heads and prunings are both after 1 and 2; the head comes first.
    left = (length, first, second)[leaves]
    # Keys and values of a block under a head are there already.
    block = lambda t: flops.block(t, 16, 16) - 4 * t * 16 * 16  # noqa: E731
    short = lambda t: flops.cls_block(t, 16, 16)  # noqa: E731
    head = 2 * 16 * (16 + 2)
    total = short(length) + head
    if leaves >= 1:
      total += block(length) + short(first) + head
    if leaves == 2:
      total += block(first) + short(second) + head
    assert int(got['length']) == length
    assert int(got['depth']) == leaves + 1
    assert got['exit_reason'] == ('last layer' if leaves == 2 else 'confidence')
    assert float(got['retention']) == pytest.approx(left / length)
    assert float(got['flops']) == pytest.approx(total)
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
      ('flops', 'flops'),
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
  guarantee = {r['loss']: r for r in result['guarantee']}
  assert set(guarantee) == {'disagreement', 'harm'}
  assert all(0 <= r['exceeded'] <= 1 for r in guarantee.values())
  assert [r['layer'] for r in result['calibration']] == [1, 2, 3]
  assert result['calibration'][1]['temperature'] == 1.0


@pytest.mark.slow
def test_sentences_show_the_positions_of_the_model(direct):
  run, records, out = direct
  model = models.record(run, run.task.model, '', np.array(TEMPERATURES))
  labels = models.labels_of(run)
  [setting] = sweeps.measure(
    model, {'never': (Rule('never'), None)}, labels,
    *models.quality_of(run)[1:],
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--time=confidence=0.61'], ['--time', 'confidence=0.61']),
    (['--prune_scales=0,4'], ['--prune_scales', '4']),
    (['--split=validation[:9]', '--limit=3'], ['--limit', 'part of its own']),
  ],
)
def test_flags_that_do_not_fit_the_run(runs, tmp_path, flags, words, capsys):
  with pytest.raises(SystemExit) as stop:
    benchmark.main(
      ['eat', f'--workdir={runs["eat"]}', f'--out={tmp_path}', *flags]
    )
  assert stop.value.code == command_line.USAGE
  message = capsys.readouterr().err.strip()
  assert message.count('\n') == 0
  for word in words:
    assert word in message


@pytest.mark.slow
def test_a_run_on_other_rows_is_refused(runs, tmp_path, capsys):
  other = models.load('x', str(runs['dense']), '', 5, '--dense')
  run = models.load('EAT', str(runs['eat']), '', 0, '--workdir')
  with pytest.raises(ValueError, match='--dense: expected a run on the same'):
    models.check_same_rows(run, other, '--dense')


# -- without a run ------------------------------------------------------------


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ([], ['--workdir']),
    (['--workdir=/nowhere', '--out=o'], ['--workdir', 'config.json']),
    (['--workdir=w', '--out=o', '--tau=2'], ['--tau', 'between 0 and 1']),
    (['--workdir=w', '--out=o', '--epsilon=1'], ['--epsilon']),
    (['--workdir=w', '--out=o', '--rows=0'], ['--rows', 'positive integer']),
    (['--workdir=w', '--out=o', '--step=last'], ['--step', 'latest']),
    (['--workdir=w', '--out=o', '--prune_scales=a'], ['--prune_scales']),
    (['--workdir=w', '--out=o', '--ablation=a'], ['--ablation', "'a'"]),
    (['--workdir=w', '--out=o', '--ablation=dense=x'], ['which is taken']),
    (['--workdir=w', '--out=o', '--densee=x'], ['--dense?']),
    (['--workdir=w', f'--out={__file__}'], ['--out', 'is a file']),
  ],
)
def test_bad_command_lines(flags, words, capsys):
  with pytest.raises(SystemExit) as stop:
    benchmark.main(['eat', *flags])
  assert stop.value.code == command_line.USAGE
  message = capsys.readouterr().err.strip()
  assert message.startswith('error: ')
  assert message.count('\n') == 0
  for word in words:
    assert word in message


def test_the_flags_fit_into_another_command():
  parser = argparse.ArgumentParser()
  commands = parser.add_subparsers(dest='command')
  eat_report.add_arguments(commands.add_parser('eat'))
  arguments = parser.parse_args(['eat', '--workdir=w', '--out=o'])
  options = eat_report.check(arguments)
  assert options == {'scales': (0.0, 0.5, 1.0), 'ablation': {}}


class FakeModule:
  """As much of a classifier as the settings need."""

  def __init__(self, heads):
    self._heads = heads

  def heads(self):
    return self._heads


def fake(logits, name='', heads=(2, 4)):
  rows = logits.shape[1]
  cost = np.array(heads, np.float64) * 10.0
  return Model(
    run=argparse.Namespace(name='EAT', directory='/run', split='dev'),
    variant=name,
    module=FakeModule(heads),
    temperatures=np.ones(len(heads)),
    logits=logits.astype(np.float32),
    length=np.full(rows, 10),
    kept=np.full((rows, 1), 7),
    left=np.tile([10, 7], (rows, 1))[:, : len(heads)],
    flops=np.tile(cost, (rows, 1)),
  )


# Confidences of 0.9 and 0.6 at the first head, the last one is always sure.
LOGITS = np.log(
  [
    [[0.9, 0.1], [0.4, 0.6], [0.1, 0.9]],
    [[0.99, 0.01], [0.99, 0.01], [0.99, 0.01]],
  ]
)
LABELS = np.array([0, 0, 1])


def measured(model, rules=None):
  return sweeps.measure(
    model, rules or sweeps.rules(model), LABELS,
    models.frontier.accuracy, models.frontier.same_class,
    np.full(3, 80.0),
  )  # fmt: skip


def test_a_setting_by_hand():
  settings = {one.name: one for one in measured(fake(LOGITS))}
  one = settings['confidence=0.8']
  assert one.exits.tolist() == [0, 1, 0]
  # Right, right, and right where the full model is wrong.
  assert one.point.quality == 1
  assert one.point.agreement == pytest.approx(2 / 3)
  assert one.depth.tolist() == [2, 4, 2]
  assert one.retention.tolist() == [1.0, 0.7, 1.0]
  assert one.flops.tolist() == [20, 40, 20]
  assert one.point.flops == pytest.approx(80 / 240)
  assert one.reasons() == ['confidence', 'last layer', 'confidence']
  assert settings['never'].point.quality == pytest.approx(2 / 3)
  # Both heads are left at once; one head agrees with itself.
  assert settings['patience=1'].exits.tolist() == [0, 0, 0]
  assert 'patience=2' not in settings
  # H(0.9) = 0.325 and H(0.6) = 0.673 nats; margins 0.8 and 0.2.
  assert settings['entropy=0.3466'].exits.tolist() == [0, 1, 0]
  assert settings['entropy=0.2079'].exits.tolist() == [1, 1, 1]
  assert settings['margin=0.1'].exits.tolist() == [0, 0, 0]
  assert settings['margin=0.7'].exits.tolist() == [0, 1, 0]


def test_choosing_what_is_timed():
  settings = measured(fake(LOGITS)) + measured(fake(LOGITS, 'no_window'))
  choose = sweeps.choose
  names = lambda *a: [s.name for s in choose(settings, *a)]  # noqa: E731
  # On the frontier: all leave at once (2 of 3 right), or two of them (all).
  auto = names('auto', 'confidence=0.9', 9)
  assert auto[:2] == ['never', 'confidence=0.9']
  points = {(s.point.flops, s.point.quality) for s in choose(settings, *(
    'auto', 'confidence=0.9', 9))}  # fmt: skip
  assert points == {(0.25, 2 / 3), (80 / 240, 1.0), (0.5, 2 / 3)}
  assert not any('no_window' in name for name in auto)
  assert names('none', 'never', 9) == []
  assert len(names('all', 'never', 9)) == len(settings)
  assert names('no_window/never,never,never', 'never', 9) == [
    'no_window/never', 'never',
  ]  # fmt: skip
  with pytest.raises(command_line.UsageError, match=r"--time: .* got 'x'"):
    names('never,x', 'never', 9)


def test_rules_of_a_regression_and_of_one_head():
  regression = fake(np.zeros((2, 3, 1)))
  rules = sweeps.rules(regression)
  assert 'tolerance=0.1' in rules
  assert 'never' in rules
  assert {rule.name for rule, _ in rules.values()} == {'patience', 'never'}
  default = sweeps.default_name
  assert default(regression, 0.9) in rules
  one = fake(LOGITS[:1], heads=(4,))
  assert list(sweeps.rules(one)) == ['never']
  assert default(one, 0.9) == 'never'


def test_the_guarantee_is_tried_on_the_recorded_rows():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((2, 400, 2)).astype(np.float32)
  logits[1] = logits[0] + 0.3 * rng.standard_normal((400, 2))
  labels = (logits[1].argmax(-1) ^ (rng.random(400) < 0.1)).astype(np.int64)
  model = fake(logits)
  loose, harm = sweeps.guarantee(model, labels, 0.1, 0.1, 50)
  assert loose['loss'] == 'disagreement'
  assert loose['exceeded'] <= 0.2
  assert loose['threshold'] is not None
  # The share of rows that leave, once more.
  powers = np.exp(logits[0].astype(np.float64))
  confidence = (powers / powers.sum(-1, keepdims=True)).max(-1)
  early = (confidence >= loose['threshold']).mean()
  assert loose['early'] == pytest.approx(early, abs=0.003)
  # Only rows that the full model has right can be harmed.
  assert harm['mean'] <= 0.1
  assert harm['early'] >= loose['early']
  with pytest.raises(ValueError, match='no exits by confidence'):
    sweeps.guarantee(fake(logits[:1], heads=(4,)), labels, 0.1, 0.1, 5)


def test_speed_by_hand():
  latency = {
    'dense/never': np.array([[4.0, 6.0], [6.0, 8.0]]),
    'never': np.array([[2.0, 3.0], [4.0, 3.0]]),
  }
  seconds = {k: v.sum(1) for k, v in latency.items()}
  together = {
    'dense/never': np.array([5.0, 5.0]),
    'never': np.array([1.0, 2.0]),
  }
  speed = Speed(
    np.array([0, 2]), latency, Timings(seconds), Timings(together),
    {'dense/never': 0, 'never': 1}, 32,
  )  # fmt: skip
  row = report_tables.speed_row('never', speed, 'dense/never')
  assert row['latency_mean'] == 3.0
  assert row['latency_p50'] == 3.0
  assert row['speedup_batch_1'] == 2.0  # 10 / 5 and 14 / 7
  assert row['speedup_batch'] == pytest.approx((5.0 + 2.5) / 2)
  assert row['throughput'] == pytest.approx(2 / 1.5)
  assert row['differing_rows'] == 1
  [setting] = measured(fake(LOGITS), {'never': (Rule('never'), None)})
  rows = report_tables.example_rows([setting], LABELS, speed)
  assert [r['latency'] for r in rows] == [3.0, None, 3.0]
  assert [r['correct'] for r in rows] == [1, 1, 0]
