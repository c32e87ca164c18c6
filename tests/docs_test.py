"""Every command of the README and of docs/ runs, at small size.

Commands are taken from the fenced blocks and the tables as they are printed. A
page is one test: its commands run in order, in one folder, so that a later one
finds the runs of the earlier ones. Data sets are stand-ins (tests.golden).
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import adatape.task
import eat.task
from halting import token_rules
from tests.golden import standin

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs/mechanisms.md'
PAGES = ('README.md', *sorted(f'docs/{p.name}' for p in ROOT.glob('docs/*.md')))

# Names in tests/small_commands.txt.
SHORT = {
  'RUN': '--config.batch_size=8 --config.log_every=1 --config.mesh.data=1',
  'STEPS': '--config.phases.0.steps=2',
  'TEXT': '--config.dataset.max_length=32',
  'FEW': '--config.dataset.max_examples=16',
}
TABLE = (ROOT / 'tests/small_commands.txt').read_text()
TREE = """\
1\tA\ta\tDET\tDT\t_\t2\tdet\t_\t_
2\tword\tword\tNOUN\tNN\t_\t0\troot\t_\t_
"""


def commands(text):
  """Yields the shell commands of a page, continued lines joined."""
  blocks = re.findall(r'^```\w*\n(.*?)^```$', text, re.M | re.S)
  in_tables = re.findall(r'^\|.*?`(python -m [^`]+)`', text, re.M)
  for block in ['\n'.join(in_tables), *blocks]:
    for line in block.replace('\\\n', '').splitlines():
      line = re.sub(r'\s+#.*$', '', line).strip()
      if re.match(r'(python|pip|pytest|echo|[A-Z]+=)', line):
        yield line


def smaller(command):
  """Returns the command at small size, or None if it is not run."""
  for entry in re.split(r'\n(?=\S)', re.sub('^#.*\n', '', TABLE, flags=re.M)):
    pattern, *words = entry.strip().split('\n')
    if re.search(pattern, command):
      flags = [SHORT.get(word, word) for word in ' '.join(words).split()]
      return None if flags == ['-'] else ' '.join([command, *flags])
  return command


@pytest.fixture(scope='module')
def stand_ins(tmp_path_factory):
  """A folder with the configs, the data and a Hugging Face directory."""
  root = tmp_path_factory.mktemp('docs')
  (root / 'configs').symlink_to(ROOT / 'configs')
  standin.write_all(root / 'data')
  sst2 = root / 'data/glue/sst2'
  unlabelled = re.sub(r'\t\w+$', '', (sst2 / 'dev.tsv').read_text(), flags=re.M)
  (sst2 / 'test.tsv').write_text(unlabelled)
  shutil.copytree(root / 'data/glue', root / 'new')
  rows = [f'w{n} w{n % 7},{"ab"[n % 2]}\n' for n in range(64)]
  for name in ('tickets.csv', 'new.csv'):
    (root / name).write_text('body,category\n' + ''.join(rows))
  (root / 'FILE.conllu').write_text(f'{TREE}\n')
  shutil.copy(root / 'FILE.conllu', root / 'en_ewt-ud-dev.conllu')
  for name in ('train.txt', 'valid.txt'):
    shutil.copy(root / 'data/texts/texts.txt', root / name)
  shutil.copy(next((root / 'data/images').rglob('*.jpg')), root / 'photo.jpg')
  dense = (
    'configs/eat/glue.py:task=sst2,model=dense,variant=minilm,epochs=1,'
    'data=data/glue,vocabulary=data/vocabulary'
  )
  short = ' '.join(SHORT[name] for name in ('RUN', 'TEXT', 'FEW'))
  narrow = '--config.model.width=24 --config.model.mlp_dim=32'
  run(root, f'python -m launch.train --workdir=tiny --config={dense} {short} '
      f'{narrow} --config.model.num_heads=2')  # fmt: skip
  run(root, 'python -m launch.export --workdir=tiny --out=minilm')
  return root


@pytest.fixture
def place(stand_ins, tmp_path):
  """A folder of a page's own, with the stand-ins in it."""
  for path in stand_ins.iterdir():
    (tmp_path / path.name).symlink_to(path)
  return tmp_path


def run(root, command):
  """Runs a command of the shell in the folder; fails with what it printed."""
  environment = os.environ | {
    'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}',
    'PYTHONPATH': str(ROOT),
    'MINILM': 'minilm',
    'XLA_FLAGS': '--xla_backend_optimization_level=0',
  }
  done = subprocess.run(
    ['bash', '-c', f'set -o pipefail; {command}'],
    cwd=root, env=environment, capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}'
  return done


def local(command):
  """Returns the command with the stand-ins' names."""
  for name, place in (
    ('/tmp/', 'tmp_'), ('GLUE_DIRECTORY', 'data/glue'),
    ('NEW_DIRECTORY', 'new'), ('=TEXTS', '=data/texts'),
    ('TAGS_DIRECTORY', 'data/tags'), ('column=upos,', ''),
    ('PROBING_DIRECTORY', 'data/probing'), ('root=DIR', 'root=data/images'),
    ('images.py:data=DIR', 'images.py:data=data/images'),
    ('=train.txt.gz', '=train.txt'), ('=valid.txt.gz', '=valid.txt'),
  ):  # fmt: skip
    command = command.replace(name, place)
  return command


@pytest.mark.nightly
@pytest.mark.parametrize('page', PAGES)
def test_commands_of_a_page_run(page, place):
  if page in ('docs/serving.md', 'docs/adaptivity.md'):
    # Runs that docs/eat.md trains.
    for name in ('tmp_sst2', 'tmp_sst2_eat'):
      (place / name).symlink_to(place / 'tiny')
  found = [smaller(c) for c in commands((ROOT / page).read_text())]
  for command in filter(None, found):
    if re.match(r'[A-Z]+=', command) or 'FILE.py' in command:
      continue  # a variable that is set above, and the form of a command
    run(place, local(command))


def test_every_page_with_commands_is_found():
  counts = {p: len(list(commands((ROOT / p).read_text()))) for p in PAGES}
  assert counts['README.md'] >= 5
  assert all(counts[f'docs/{family}.md'] for family in (
    'adatape', 'eat', 'albert_act', 'recurrent_act', 'looped'
  ))  # fmt: skip


@pytest.mark.parametrize('page', PAGES)
def test_links_of_a_page_lead_somewhere(page):
  text = (ROOT / page).read_text()
  for link in re.findall(r'\]\(([^)#]+)', text):
    assert ((ROOT / page).parent / link).exists(), link
  for command in re.findall(r'pytest [^`\n]+', text):
    for tests in re.findall(r'tests/[\w/.]+', command):
      assert (ROOT / tests).exists(), tests


@pytest.mark.slow
def test_the_mechanisms_of_the_page_run():
  names = {}
  for block in re.findall(
    r'^```python\n(.*?)^```$', PAGE.read_text(), re.M | re.S
  ):
    exec(compile(block, str(PAGE), 'exec'), names)
  assert names['result'].output.shape == (3, 8)
  assert [*names['state'].steps] == [1, 2]
  assert [*names['rule'].first(names['heads'])] == [0, 1]
  kept, merged, tape = names['kept'], names['merged'], names['tape']
  assert kept.x.shape == (2, names['size'], 64) == (2, 139, 64)
  assert [*kept.length] == [139, 106]
  assert merged.x.shape == (2, 181, 64)
  assert tape.tokens.shape == (3, 10, 64)
  assert abs(names['gradients'].score.kernel[...]).max() > 0


def test_the_grids_of_certificates_are_those_of_the_code():
  text = (ROOT / 'docs/serving.md').read_text()
  most, (*scales,) = max(token_rules.EPSILONS), eat.task.SCALES
  shares = adatape.task.SHARES
  for words in (
    f'| `epsilon` up to {most} |', ', '.join(f'{s:g}' for s in scales),
    f'times {shares[0]} to {shares[-1]}',
  ):  # fmt: skip
    assert words in text
