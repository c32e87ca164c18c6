"""A family is added by a folder and a configuration; no file is edited.

A rule or a router is one file. Families and rules are those of CONTRIBUTING.md.
"""

import json
import os
import pathlib
import re
import shutil

import cv2
import numpy as np
import pytest

from tests import imports_test, packages, shell
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


def launch(command, tree, *flags, path=None, **options):
  """Runs a command in the copy; returns stdout."""
  environment = os.environ | {'PYTHONPATH': str(path or tree)}
  return shell.launch(command, *flags, cwd=tree, env=environment, **options)


FEW = (
  '--config.phases.0.steps=2', '--config.batch_size=8',
  '--config.dataset.test_examples=16',
)  # fmt: skip


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
  installed = json.loads(shell.python('-c', code, cwd=tree).stdout)
  assert {*FAMILIES, 'train_lib'} <= set(installed)
  assert not {'benchmarks', 'configs', 'launch', 'tests'} & set(installed)


@pytest.mark.parametrize('family', first_is_slow(*zip(sorted(FAMILIES))))
def test_its_configuration_trains(tree, family, tmp_path):
  config = f'--config=configs/{family}/parity.py'
  launch('train', tree, config, f'--workdir={tmp_path}/run', *FEW)
  result = shell.result(tmp_path / 'run')
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
  config, run = '--config=parity.py', f'--workdir={tmp_path}/run'
  launch('check', tmp_path, config, path=ROOT)
  launch('train', tmp_path, config, run, *FEW, path=ROOT)
  trust = run, '--evals=test', '--trust=pooled'
  assert 'accuracy' in launch('evaluate', tmp_path, *trust, path=ROOT)


@pytest.mark.slow
def test_a_policy_of_its_own_is_bundled(tree, tmp_path):
  run, place = f'--workdir={tmp_path}/run', f'--bundle={tmp_path}/model'
  launch('train', tree, '--config=configs/unsure/parity.py', run, *FEW)
  for share, is_unsure in ((0.0, False), (1.0, True)):
    margin = f'--serve=margin={share}'
    launch('export', tree, run, place, margin, '--batches=1')
    line = '{"tokens": [0, 1, 1, 0, 1, 0, 0, 1]}\n'
    ask = place, '--compilation_cache=none'
    answer = json.loads(launch('predict', tree, *ask, input=line))
    assert answer['label'] in ('even', 'odd')
    assert answer['unsure'] is is_unsure
    assert answer['exit_reason'] == 'whole model'


@pytest.mark.nightly
def test_its_tests_and_the_contract_find_it(tree):
  names = ' or '.join(FAMILIES)
  # The contract loads a file without arguments, and this one needs a tokenizer.
  rule = tree / 'configs' / 'hasty.py'
  hidden = rule.rename(tree / 'hasty_config.txt')
  text = shell.python(
    '-m', 'pytest', '-vv', '-p', 'no:cacheprovider',
    '-o', 'addopts=--import-mode=importlib',
    'tests/pooled', 'tests/contract_test.py', 'tests/imports_test.py',
    '-k', f'{names} or every_task',
    cwd=tree, env=os.environ | {'PYTHONPATH': str(tree)},
  ).stdout  # fmt: skip
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


@pytest.mark.parametrize('kind', first_is_slow(*zip(ONE_FILE)))
def test_one_file_is_trained_served_and_bundled(tree, kind, tmp_path):
  flag, overrides, serve, module = ONE_FILE[kind]
  folders = {
    'glue': standin.write_glue(tmp_path),
    'vocabulary': standin.write_vocabulary(tmp_path),
  }
  run, bundle = f'--workdir={tmp_path}/run', f'--bundle={tmp_path}/file'
  config = f'--config=configs/{flag.format(**folders)}'
  texts = [item.format(**folders) for item in (*adapter.SHRUNK, *overrides)]
  launch('train', tree, config, run, *(f'--config.{text}' for text in texts))
  options = [f'--trust={module}', *serve]
  launch('export', tree, run, bundle, *options)
  lines = '"w1 w2"\n"w3"\n'
  if kind == 'router':
    lines = ''
    for number in range(2):
      pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3))
      cv2.imwrite(f'{tmp_path}/{number}.png', pixels)
      lines += f'"{tmp_path}/{number}.png"\n'
  served, bundled = (
    list(map(json.loads, launch(
      'predict', tree, *source, '--compilation_cache=none', input=lines
    ).splitlines()))
    for source in ((run, *options), (bundle, options[0]))
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
    forms = 'both_forms.py', tmp_path / 'run'
    assert float(shell.python(*forms, cwd=tree).stdout) < 1e-5
