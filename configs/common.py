"""Arguments of configuration files, `config.py:n=32,model=transformer`.

Arguments choose the structure of a configuration: model, task, size, data,
checkpoint. Every other field is overridden by `--config.field=value`. Fields
that a configuration does not set have the defaults of `train_lib.config_schema`
and of the classes that it names.
"""

import difflib
import json
import pathlib
from typing import Any

import ml_collections

GLUE = (
  'sst2', 'cola', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli'
)  # fmt: skip

# Classes of `halting.token_rules` by the values of an argument.
RULES = {
  'act': 'ACT', 'straight_through': 'StraightThrough', 'skip': 'SkipACT',
  'ponder_net': 'PonderNet', 'fixed': 'Fixed',
}  # fmt: skip


def rule(name: str, **settings: Any) -> dict[str, Any]:
  """Returns the halting rule of a model."""
  return dict(name=f'halting.token_rules:{RULES[name]}', **settings)


def glue(a: ml_collections.ConfigDict, **fields: Any) -> dict[str, Any]:
  """Returns the data set of a GLUE task; a.data is a folder, '' for TFDS."""
  builder = '' if a.data else f'glue/{a.task}'
  return dict(
    name='glue', task=a.task, directory=a.data, builder=builder, **fields
  )


def images(root: str, builder: str, **fields: Any) -> dict[str, Any]:
  """Returns a data set of images in a folder, or of TFDS without one."""
  if root:
    return dict(name='folder', root=root, **fields)
  return dict(name='tfds', builder=builder, **fields)


def held_out(percent: int) -> tuple[str, str]:
  """Returns the splits to train and evaluate on; 0 % holds nothing out."""
  if not percent:
    return 'train', 'validation'
  return f'train[:{100 - percent}%]', f'train[{100 - percent}%:]'


def adamw(lr: float) -> dict[str, Any]:
  """Returns the optimizer that BERT is fine-tuned with."""
  return dict(
    name='adamw', lr=lr, schedule='linear', warmup_steps=0.1,
    weight_decay=0.01, eps=1e-6,
  )  # fmt: skip


def glue_split(task: str) -> str:
  """Returns the name of the split to evaluate on."""
  return 'validation_matched' if task == 'mnli' else 'validation'


def submissions(task: str) -> dict[str, Any]:
  """Returns evaluations that write the test splits for GLUE's server."""
  splits = ['test']
  if task == 'mnli':
    splits = ['test_matched', 'test_mismatched', 'ax']
  return {f'submit_{s}': dict(type='submission', split=s) for s in splits}


def parse_arg(arg: str, **defaults: Any) -> ml_collections.ConfigDict:
  """Reads the argument of a configuration file, the text after the colon.

  `defaults` are the legal names with their default values; a value is read with
  the type of its default. A tuple lists the legal values of a name, the first
  being the default. Raises ValueError for another name or value.
  """
  values = {k: v[0] if isinstance(v, tuple) else v for k, v in defaults.items()}
  for item in filter(None, (arg or '').split(',')):
    name, separator, text = item.partition('=')
    if name not in defaults or not separator:
      near = difflib.get_close_matches(name, defaults, 1)
      hint = f'did you mean {near[0]!r}? ' if near else ''
      raise ValueError(
        f'config argument {item!r}: {hint}expected name=value with a name of '
        f'{sorted(defaults)}; fields are set by --config.field=value'
      )
    kind, legal = type(values[name]), defaults[name]
    try:
      values[name] = kind(text)
    except ValueError:
      expect(False, name, kind.__name__, text)
    if isinstance(legal, tuple):
      expect(values[name] in legal, name, f'one of {list(legal)}', text)
  return ml_collections.ConfigDict(values)


def expect(is_legal: bool, name: str, expected: str, given: Any) -> None:
  """Raises ValueError for an illegal value of an argument."""
  if not is_legal:
    message = f'config argument {name}: expected {expected}, got {given!r}'
    raise ValueError(message)


def layers(name: str, text: str) -> tuple[int, ...]:
  """Reads an argument such as '2-3-4'."""
  items = text.split('-') if text else []
  is_legal = all(item.isdecimal() for item in items)
  expect(is_legal, name, 'layers such as 2-3-4', text)
  return tuple(map(int, items))


def encoder_of(checkpoint: str) -> tuple[str, int, int]:
  """Reads kind, layers and width of a run or of a Hugging Face model.

  The kind is the class of a run's model or Hugging Face's model_type.
  """
  try:
    path = pathlib.Path(checkpoint, 'config.json')
    if path.stat().st_size > 2**26 or not path.is_file():  # a pipe would wait
      raise ValueError('config.json: expected a regular file of JSON')
    content = json.loads(path.read_bytes())
    content = content.get('model', content)
    names = 'depth', 'num_hidden_layers', 'n_layers'
    kind = content.get('model_type') or content.get('name', '')
    depth = next(content[name] for name in names if name in content)
    names = 'width', 'hidden_size', 'dim'
    width = next((content[name] for name in names if name in content), 0)
    return str(kind), int(depth), int(width)
  except (
    OSError, ValueError, TypeError, AttributeError, StopIteration,
    RecursionError,
  ) as error:  # fmt: skip
    raise ValueError(
      'config argument pretrained or teacher: expected the directory of a run '
      f'or of a Hugging Face BERT, got {checkpoint!r} ({error})'
    ) from error
