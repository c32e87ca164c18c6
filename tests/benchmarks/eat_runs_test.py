"""The report of tiny trained EATs, by recomputation; engines under load."""

import json

import jax
import numpy as np
import pytest

from benchmarks import eat, peers, recorded_runs, serve
from core.errors import ConfigError
from tests.benchmarks.command_test import parse, read
from tests.launch import toy_runs
from tests.launch.toy_runs import TEMPERATURES


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  directory = tmp_path_factory.mktemp('runs')
  toy_runs.write_data(directory)
  eat = toy_runs.train(
    directory, 'eat', 'model=eat', 'model.depth=3',
    'model.prune_layers=(1,2)', 'model.prune_ratios=(.3,.3)',
    'model.exit_layers=(1,2)', 'model.window=4',
    'loss.exit_weights=(0.3,0.3,1.0)',
  )  # fmt: skip
  fitted = {'temperatures': TEMPERATURES, 'calibration_split': toy_runs.FITTED}
  (eat / 'calibration.json').write_text(json.dumps(fitted))
  dense = toy_runs.train(directory, 'dense', 'model=dense', 'model.depth=2')
  return {'dense': str(dense), 'eat': str(eat)}


@pytest.fixture(scope='module')
def run(runs):
  return recorded_runs.load('EAT', runs['eat'], '--workdir')


@pytest.fixture(scope='module')
def direct(run):
  """What the model says of all rows in one call."""
  names = ('tokens', 'token_types', 'length')
  apply = jax.jit(run.module.apply)
  _, out = apply(
    run.policy.chain.variables, *(run.records[name] for name in names)
  )
  return jax.device_get(out)


@pytest.fixture(scope='module')
def tau(direct):
  """Half of the rows leave at the first head."""
  median = np.median(toy_runs.confidences(direct['exits'])[0])
  return round(float(median), 4)


@pytest.fixture(scope='module')
def made(runs, tau, tmp_path_factory):
  """The directory of a whole report."""
  out = tmp_path_factory.mktemp('report') / 'out'
  flags = [
    f'--workdir={runs["eat"]}', f'--dense={runs["dense"]}', f'--out={out}',
    f'--ablation=again={runs["dense"]}', '--rows=10', '--prune_scales=0,1',
    '--warmup=1', '--rounds=2', '--batch_size=2', '--guarantee',
    '--epsilon=0.3', f'--tau={tau}', '--draws=20',
    f'--time=never,confidence={tau},prune_0/never', '--peers=none',
  ]  # fmt: skip
  assert eat.main([*flags]) == 0
  return out


@pytest.mark.nightly
def test_every_file_is_there(made):
  pictures = [
    'frontier', 'frontier_batch', 'frontier_flops', 'exits', 'retention',
    'ablation',
  ]  # fmt: skip
  wanted = {f'{p}.{kind}' for p in pictures for kind in ('png', 'pdf')}
  tables = ('settings', 'timings', 'calibration', 'retention', 'guarantee')
  wanted |= {f'{name}.csv' for name in tables}
  names = {path.name for path in made.iterdir()}
  assert names == wanted | {'result.json'}
  settings = {row['setting']: row for row in read(made / 'settings.csv')}
  variants = {name.partition('/')[0] for name in settings if '/' in name}
  assert variants == {'dense', 'again', 'prune_0'}
  assert float(settings['prune_0/never']['retention']) == 1
  # Six of 24 rows were fitted.
  assert {row['rows'] for row in read(made / 'calibration.csv')} == {'18'}
  assert {row['rows'] for row in read(made / 'guarantee.csv')} == {'18'}


@pytest.mark.nightly
def test_timings_have_the_limit_by_flops(made, tau):
  timings = read(made / 'timings.csv')
  names = ['dense/never', 'again/never', f'confidence={tau:g}', 'never',
           'prune_0/never']  # fmt: skip
  assert sorted(row['candidate'] for row in timings) == sorted(names * 2)
  served = {(r['candidate'], r['batch']): float(r['flops']) for r in timings}
  for row in timings:
    assert row['baseline'] == 'dense/never'
    batch = row['batch']
    limit = served['dense/never', batch] / served[row['candidate'], batch]
    assert float(row['limit']) == pytest.approx(limit)
    if batch == '1':
      assert 0 < float(row['latency_p50']) <= float(row['latency_p95'])


@pytest.mark.nightly
def test_recorded_logits_are_those_of_the_model(run, direct):
  found = recorded_runs.record(run)
  np.testing.assert_allclose(found.logits, direct['exits'], atol=1e-4)
  np.testing.assert_array_equal(found.observed, direct['kept'].T)
  np.testing.assert_array_equal(found.observed, found.kept)


@pytest.mark.nightly
def test_flags_that_do_not_fit_the_run(runs, run):
  with pytest.raises(ConfigError) as caught:
    list(recorded_runs.variants(run, (4.0,)))
  assert caught.value.field == '--prune_scales'
  longest = int(run.records['length'].max())
  with pytest.raises(ConfigError) as caught:
    recorded_runs.load('', runs['eat'], '--workdir', lengths=(longest - 1,))
  assert caught.value.field == '--lengths'
  other = recorded_runs.load('x', runs['dense'], '--dense', limit=5)
  assert (len(other.fitted), other.facts['temperatures']) == (5, 'none')
  origin = run.facts['temperatures']
  assert origin == 'calibration.json, fitted to validation[:25%]'
  # A part of a split is drawn: lines 4, 6, 12, 13, 20 and 23 of dev.tsv.
  assert np.flatnonzero(run.fitted).tolist() == [2, 4, 10, 11, 18, 21]
  flags = parse(f'eat --workdir={runs["eat"]} --dense={runs["eat"]} --out=o')
  with pytest.raises(ConfigError, match='expected a run without exits'):
    recorded_runs.sweep(flags)


@pytest.mark.nightly
def test_batches_of_one_row_are_timed_once(runs, tmp_path):
  flags = ['--rows=2', '--rounds=1', '--batch_size=1', '--peers=none']
  assert eat.main([*few(runs['eat'], tmp_path), *flags]) == 0
  (row,) = read(tmp_path / 'timings.csv')
  assert (row['candidate'], row['batch']) == ('never', '1')
  assert float(row['latency_p95']) > 0


def few(eat, out):
  """Flags of a report of one setting."""
  return [f'--workdir={eat}', f'--out={out}', '--time=never', '--warmup=1',
          '--prune_scales=1']  # fmt: skip


def under_load(runs, path, *flags):
  where = [f'--workdir={runs["eat"]}', f'--dense={runs["dense"]}']
  small = ['--rows=9', '--seconds=0.1', '--loads=50,120', '--batch_size=1']
  assert serve.main([*where, f'--out={path}', *small, *flags]) == 0
  rows = read(path)
  assert {float(row['goodput']) > 0 for row in rows} == {True}
  return [row['candidate'] for row in rows]


@pytest.mark.nightly
def test_engines_under_load(runs, tmp_path):
  names = under_load(runs, tmp_path / 'load.csv', '--peers=none')
  assert names == ['EAT, engine', 'dense, engine'] * 4
  assert (tmp_path / 'load.png').exists()


@pytest.mark.nightly
@pytest.mark.peers
def test_other_libraries_give_our_answers(runs, tmp_path):
  if [*peers.usable(peers.PACKAGES)] != [*peers.PACKAGES]:
    pytest.skip('needs the extra [peers]')
  names = under_load(runs, tmp_path / 'load.csv', '--deadline_ms=10000')
  assert names[2:4] == ['dense, PyTorch', 'dense, ONNX Runtime']
  assert len(names) == 16
  flags = ['--rows=7', '--rounds=2', '--batch_size=3']
  dense = f'--dense={runs["dense"]}'
  assert eat.main([*few(runs['eat'], tmp_path), dense, *flags]) == 0
  timings = read(tmp_path / 'timings.csv')
  names = ['dense/never', 'never', 'PyTorch dense', 'ONNX Runtime dense']
  assert [row['candidate'] for row in timings] == names * 2
  for row in timings:
    if row['difference']:
      assert float(row['difference']) < 1e-3
