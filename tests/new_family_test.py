"""A family is added by a folder and a configuration; no file is edited.

A rule or a router is one file. Families and rules are those of CONTRIBUTING.md.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests import imports_test, packages
from tests.golden import adapter, standin
from tests.marks import first_is_slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'```python\n# (\S+\.py)\n(.*?)```', re.DOTALL)
TEST = '''"""The shapes of `pooled` are checked at run time."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from pooled.model import Pooled


def test_shapes():
  model, key = Pooled(num_classes=2), jax.random.key(0)
  (logits, _), _ = model.init_with_output(key, jnp.zeros((3, 8), jnp.int32))
  assert logits.shape == (3, 2)
  with pytest.raises(TypeCheckError):
    model.init(key, jnp.zeros((3, 8, 1)))
'''

# Files of a family with a policy of its own, and of a router in one file.
FILES = ROOT / 'tests' / 'new_family'


def documented():
  """Source text by path, of all families of the guide."""
  return dict(BLOCK.findall((ROOT / 'CONTRIBUTING.md').read_text()))


FAMILIES = tuple(
  path.partition('/')[0] for path in documented() if '__init__' in path
)


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
  """A copy of the checkout with the families."""
  root = tmp_path_factory.mktemp('family') / 'checkout'
  ignored = shutil.ignore_patterns('.git', '__pycache__', '*_cache', 'docs')
  shutil.copytree(ROOT, root, ignore=ignored)
  own = {str(path.relative_to(FILES)): path for path in FILES.rglob('*.py')}
  files = documented() | {name: own[name].read_text() for name in own}
  files['tests/pooled/model_test.py'] = TEST
  for name, text in files.items():
    path = root / name
    assert not path.exists(), 'a family edits no file'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return root


def python(tree, *arguments, path=None, **options):
  """Runs Python in the copy, with `input`; returns stdout."""
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=tree,
    env=os.environ | {'PYTHONPATH': str(path or tree)},
    capture_output=True,
    text=True,
    check=False,
    **options,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def test_it_may_import_the_libraries_and_no_more(tree):
  legal = imports_test.may_import(tree)
  assert set(FAMILIES) <= set(packages.families(tree)) <= set(legal)
  for name in FAMILIES:
    for path in (tree / name).rglob('*.py'):
      assert not imports_test.forbidden(path, name, legal), path
  assert {f'configs/{name}/parity.py' for name in FAMILIES} <= {
    *packages.config_files(tree)
  }


def test_it_is_installed(tree):
  code = (
    'import json, setuptools\n'
    'setuptools.setup = lambda **given: print(json.dumps(given["packages"]))\n'
    'exec(open("setup.py").read())\n'
  )
  installed = json.loads(python(tree, '-c', code))
  assert {*FAMILIES, 'train_lib'} <= set(installed)
  assert not {'benchmarks', 'configs', 'launch', 'tests'} & set(installed)


@pytest.mark.parametrize('family', first_is_slow(*zip(sorted(FAMILIES))))
def test_its_configuration_trains(tree, family, tmp_path):
  python(
    tree, '-m', 'launch.train', f'--config=configs/{family}/parity.py',
    f'--workdir={tmp_path}/run', '--config.phases.0.steps=2',
    '--config.batch_size=8', '--config.dataset.test_examples=16',
  )  # fmt: skip
  result = json.loads((tmp_path / 'run' / 'result.json').read_text())
  assert result['steps'] == 2
  assert 'test/accuracy' in result


@pytest.mark.slow
def test_a_family_outside_the_checkout_trains(tmp_path):
  """From a folder of its own, whose packages commands find."""
  for name, text in documented().items():
    if 'pooled' in name:
      path = tmp_path / name.replace('configs/pooled/', '')
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
  run = f'--workdir={tmp_path}/run'
  python(tmp_path, '-m', 'launch.check', '--config=parity.py', path=ROOT)
  python(
    tmp_path, '-m', 'launch.train', '--config=parity.py', run,
    '--config.phases.0.steps=2', '--config.batch_size=8',
    '--config.dataset.test_examples=16', path=ROOT,
  )  # fmt: skip
  trust = ('-m', 'launch.evaluate', run, '--evals=test', '--trust=pooled')
  assert 'accuracy' in python(tmp_path, *trust, path=ROOT)


@pytest.mark.slow
def test_a_policy_of_its_own_is_bundled(tree, tmp_path):
  python(
    tree, '-m', 'launch.train', '--config=configs/unsure/parity.py',
    f'--workdir={tmp_path}/run', '--config.phases.0.steps=2',
    '--config.batch_size=8', '--config.dataset.test_examples=16',
  )  # fmt: skip
  place = f'--bundle={tmp_path}/model'
  for share, is_unsure in ((0.0, False), (1.0, True)):
    python(
      tree, '-m', 'launch.export', f'--workdir={tmp_path}/run', place,
      f'--serve=margin={share}', '--batches=1',
    )  # fmt: skip
    line = '{"tokens": [0, 1, 1, 0, 1, 0, 0, 1]}\n'
    text = python(
      tree, '-m', 'launch.predict', place, '--compilation_cache=none',
      input=line,
    )  # fmt: skip
    answer = json.loads(text)
    assert answer['label'] in ('even', 'odd')
    assert answer['unsure'] is is_unsure
    assert answer['exit_reason'] == 'whole model'


@pytest.mark.nightly
def test_its_tests_and_the_contract_find_it(tree):
  names = ' or '.join(FAMILIES)
  # The contract loads a file without arguments, and this one needs a tokenizer.
  rule = tree / 'configs' / 'hasty.py'
  hidden = rule.rename(tree / 'hasty_config.txt')
  text = python(
    tree, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider',
    '-o', 'addopts=--import-mode=importlib',
    'tests/pooled', 'tests/contract_test.py', 'tests/imports_test.py',
    '-k', f'{names} or every_task',
  )  # fmt: skip
  hidden.rename(rule)
  for family in FAMILIES:
    assert f'finite_gradients_and_trains[configs/{family}/parity.py]' in text
    assert f'may[{family}]' in text


TEXTS = ['--lengths=16', '--batches=2']
# Configuration, its overrides, options of serving, module to trust.
ONE_FILE = {
  'token rule': ('hasty.py:task=sst2,data={glue}', [
    *adapter.FINE_TUNED, 'phases.0.steps=2', 'phases.0.epochs=0',
  ], TEXTS, 'hasty'),
  'row rule': (
    'eat/glue.py:task=sst2,data={glue},vocabulary={vocabulary},variant=tiny,'
    'parts=pe,exits=1-2,recipe=paper', [
      *adapter.EAT, 'dataset.max_length=32',
      'phases.0.steps=1', 'phases.0.epochs=0',
      'phases.1.steps=1', 'phases.1.epochs=0',
    ], [*TEXTS, '--serve=rule=hasty:Odds,rule.least=1'], 'hasty'),
  'router': ('depths.py', [
    'phases.0.steps=2', 'phases.0.epochs=0', 'evals={{}}',
  ], ['--batches=2'], 'depths'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('kind', ONE_FILE)
def test_one_file_is_trained_served_and_bundled(tree, kind, tmp_path):
  flag, overrides, serve, module = ONE_FILE[kind]
  folders = {
    'glue': str(standin.write_glue(tmp_path)),
    'vocabulary': str(standin.write_vocabulary(tmp_path)),
  }
  run, bundle, trust = (
    f'{tmp_path}/run',
    f'{tmp_path}/file',
    f'--trust={module}',
  )
  texts = [item.format(**folders) for item in (*adapter.SHRUNK, *overrides)]
  python(
    tree, '-m', 'launch.train', f'--workdir={run}',
    f'--config=configs/{flag.format(**folders)}',
    *(f'--config.{text}' for text in texts),
  )  # fmt: skip
  options = [trust, *serve]
  python(
    tree, '-m', 'launch.export', f'--workdir={run}', f'--bundle={bundle}',
    *options,
  )  # fmt: skip
  lines = '"w1 w2"\n"w3"\n'
  if kind == 'router':
    lines = ''
    for number in range(2):
      pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3))
      cv2.imwrite(f'{tmp_path}/{number}.png', pixels)
      lines += f'"{tmp_path}/{number}.png"\n'
  command = '-m', 'launch.predict', '--compilation_cache=none'
  served, bundled = (
    [json.loads(line) for line in python(
      tree, *command, *source, input=lines
    ).splitlines()]
    for source in (
      [f'--workdir={run}', *options], [f'--bundle={bundle}', trust],
    )
  )  # fmt: skip
  assert len(served) == 2
  for one, same in zip(served, bundled, strict=True):
    assert one['label'] == same['label']
    assert one['exit_reason'] == same['exit_reason']
  if kind == 'row rule':  # the first class is as likely as any other
    assert {one['exit_reason'] for one in served} == {'odds'}
  elif kind == 'token rule':
    config = json.loads((tmp_path / 'run' / 'config.json').read_text())
    assert config['model']['rule'] == {'name': 'hasty:First', 'limit': 0.6}
  else:
    assert float(python(tree, 'both_forms.py', run)) < 1e-5
