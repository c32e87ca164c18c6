"""The shipped experiments, as a user runs them, to the promised accuracy."""

import json

import pytest

from tests import shell

SMALL = (
  '--config=configs/adatape/parity.py', '--config.batch_size=8',
  '--config.mesh.data=1', '--config.checkpoint.every_steps=0',
  '--config.phases.0.steps=2', '--config.log_every=1',
  '--config.dataset.test_examples=16',
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)


@pytest.fixture
def quick_to_compile(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=0')


def launch(command, workdir, *arguments):
  return shell.launch(command, f'--workdir={workdir}', *arguments)


@pytest.mark.nightly
@pytest.mark.parametrize('model', ['learn', 'input', 'vit'])
def test_digits_and_the_few_shot_table_of_its_checkpoint(model, tmp_path):
  launch('train', tmp_path, f'--config=configs/adatape/digits.py:model={model}')
  accuracy = shell.result(tmp_path)['accuracy']
  assert accuracy >= 0.96
  text = launch('evaluate', tmp_path, '--evals=test,fewshot')
  row = json.loads((tmp_path / 'evaluation.json').read_text())[0]
  assert row['test/accuracy'] == pytest.approx(accuracy)
  assert 'fewshot/10shot' in text
  # Features of a model that saw all labels: far above the chance of 0.1.
  assert row['fewshot/10shot'] > 0.9


@pytest.mark.slow
def test_a_dry_run_prints_sizes_and_writes_nothing(tmp_path, quick_to_compile):
  text = launch('train', tmp_path / 'run', *SMALL, '--dry_run')
  for word in ('parameters', 'FLOPs', 'memory', 'tokens [8, 16] int32'):
    assert word in text
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_trials_and_evaluations_find_the_programs_of_others(
  tmp_path, monkeypatch, quick_to_compile
):
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  monkeypatch.delenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))

  def kept(name):
    return {*tmp_path.glob(f'adaptive_computation/steps-*/jit_{name}-*-cache')}

  for rate in (0.1, 0.2):
    rates = f'--config.optimizer.lr={rate}', f'--config.optimizer.end_lr={rate}'
    launch('train', tmp_path / str(rate), *SMALL, *rates)
    assert len(kept('train_step')) == 1
  programs, calls = kept('*'), kept('call')
  launch('evaluate', tmp_path / '0.2', '--evals=test')
  assert kept('*') > programs  # it keeps its own
  assert kept('call') == calls  # and finds the evaluation of the training
  assert calls


@pytest.mark.slow
def test_a_run_with_tensorboard_imports_no_tensorflow(
  tmp_path, quick_to_compile
):
  code = (
    'import sys\nfrom launch import train\ntrain.main(sys.argv[1:])\n'
    "assert 'tensorflow' not in sys.modules\n"
  )
  shell.python('-c', code, *SMALL, f'--workdir={tmp_path}')
  assert list((tmp_path / 'tensorboard').iterdir())
