"""Wrong models are found before a training: a line with the fix for each."""

import re

import pytest

from launch import check, train
from tests.golden import standin

CONFIG = """
import ml_collections

def get_config(arg=''):
  c = ml_collections.ConfigDict()
  kind, _, mistake = arg.partition(',')
  name = f'tests.launch.wrong_models:{kind or "Model"}'
  c.model = dict(name=name, mistake=mistake)
  c.dataset = dict(name='parity', length=8)
  c.phases = (dict(steps=1),)
  return c
"""
# Words of each line, in their order.
MISTAKES = {
  'Bare': [
    ('num_classes: int', 'add it'), ('dtype: Any = jnp.float32', 'add it'),
    ('row_keys=None', 'add it'),
  ],
  ',alone': [
    ('model: expected (logits, out), got an array; return `logits, {}`',)
  ],
  ',three': [('a tuple of 3', 'dict `out`')],
  ',no dict': [('(logits, NoneType)', 'return a dict')],
  ',sum': [('logits: expected [..., 2], got float32 [4]', 'nn.Dense')],
  ',classes': [('logits: expected [..., 2], got float32 [4, 3]', 'nn.Dense')],
  ',half': [('got bfloat16 [4, 2] with dtype=bfloat16', 'nn.Dense')],
  ',mean': [('out.cost: expected an axis of rows [4, ...], got float32 []',)],
  ',normalized': [('rows alone: expected equal', 'BatchNorm')],
  ',noisy': [('rows alone, with noise: expected equal', 'row_random')],
  ',root': [('gradient of Dense_*/bias, Dense_*/kernel: expected finite',)],
  ',broken': [('wrong_models.py:', 'AttributeError', 'nothing')],
  ',two': [('out.cost',), ('rows alone',)],
}  # fmt: skip


@pytest.fixture
def flag(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text(CONFIG)
  return f'--config={path}:'.__add__


@pytest.fixture
def found(capsys):
  """Runs a check; returns the lines of its mistakes."""

  def run(*arguments):
    with pytest.raises(SystemExit) as stop:
      check.main([*arguments])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert not printed.out
    told = printed.err.splitlines()
    lines = [line for line in told if not line.startswith('phase ')]
    assert all(line.startswith('error: ') for line in lines)
    return lines

  return run


@pytest.mark.parametrize('name', MISTAKES)
def test_each_mistake_is_a_line_with_its_fix(name, flag, found):
  lines = found(flag(name))
  assert len(lines) == len(MISTAKES[name])
  for line, words in zip(lines, MISTAKES[name], strict=True):
    assert all(word in line for word in words), line


def test_a_rule_whose_last_step_halts_nothing_is_named(found):
  # The file leaves the rule to the model's default.
  rule = '--config.model.rule.name=tests.launch.wrong_models:Endless'
  running, weights = found(
    '--config=configs/adatape/parity.py:n=8,model=ut', rule
  )
  assert 'model.rule: expected no running item after `is_last`' in running
  assert 'model.rule: expected weights of sum 1' in weights


def test_a_mistake_of_a_task_names_its_line(flag, found):
  task = '--config.task=tests.launch.wrong_models:Task'
  (line,) = found(flag(''), task)
  assert 'wrong_models.py:' in line
  assert "KeyError: 'costs'" in line


def test_a_right_model_is_a_table(flag, capsys):
  assert check.main([flag('')]) == 0
  out, told = capsys.readouterr()
  assert told.splitlines()[-2:] == [
    f'phase 0: checking {name}' for name in ('gradient', 'flops')
  ]  # fmt: skip
  rows = dict(re.findall(r'^ +(\S.*?)  +(\S.*?) *$', out, re.M))
  assert rows['logits'] == 'float32 [4, 2]'
  assert rows['parameters'] == f'{25 * 8 + 9 * 2}'
  assert rows['without a gradient'] == 'none'
  # 2 * (24 * 8 + 8 * 2) of the products, and a few more.
  assert rows['Dense_*/kernel'] == f'{24 * 8 + 8 * 2}'
  flops = int(rows['FLOPs of a row, compiler'].split(',')[0])
  assert 416 <= flops <= 500


def test_parameters_without_a_gradient_are_listed(flag, capsys):
  assert check.main([flag(',frozen')]) == 0
  assert 'Dense_*/bias, Dense_*/kernel' in capsys.readouterr().out


def test_a_pattern_without_parameters_is_refused(flag, found):
  (line,) = found(flag(''), "--config.optimizer.scales=('heat->2',)")
  assert line.startswith('error: optimizer.scales: expected')


def test_texts_must_not_depend_on_their_padding(tmp_path, flag, found):
  data = {'name': 'glue', 'task': 'sst2', 'max_length': 16}
  data['directory'] = str(standin.write_glue(tmp_path) / 'sst2')
  data['tokenizer'] = str(standin.write_vocabulary(tmp_path))
  text = CONFIG.replace("dict(name='parity', length=8)", repr(data))
  (tmp_path / 'config.py').write_text(text)
  task = '--config.task=train_lib.text_classification:TextClassification'
  (line,) = found(flag('Padded'), task)
  assert 'rows padded: expected equal' in line
  assert 'mask what is after `length`' in line


def test_images_that_are_not_here_are_drawn(tmp_path, capsys):
  given = f'configs/images.py:data={tmp_path},size=16,variant=Ti/16'
  small = ('depth=1', 'width=16', 'num_heads=2', 'mlp_dim=16', 'patch_size=8')
  assert check.main([
    f'--config={given},model=vit', *(f'--config.model.{s}' for s in small)
  ]) == 0  # fmt: skip
  out = capsys.readouterr().out
  assert 'random rows' in out
  assert 'float32 [4, 10]' in out


@pytest.mark.parametrize('mistake', [',alone', ',classes'])
def test_a_training_says_the_same_of_a_model(mistake, flag, tmp_path, refused):
  words = [word.replace('[4, 3]', '') for word in MISTAKES[mistake][0]]
  refused(train.main, [flag(mistake), f'--workdir={tmp_path}/run'], words)


def test_the_complete_configuration_is_printed(flag, capsys):
  assert train.main([flag(''), '--print_config', '--config.seed=3']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert {
    'seed = 3', 'model.width = 8', 'phases.0.steps = 1', 'evals = {}',
    "dataset.name = 'parity'", 'optimizer.scales = ()', 'mesh.data = -1',
  } <= {*lines}  # fmt: skip
