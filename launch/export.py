"""Writes a trained text classifier as a Hugging Face directory.

  python -m launch.export --workdir=/tmp/sst2 --out=/tmp/sst2_hf

The directory holds config.json with the names of the classes,
model.safetensors, tokenizer.json and vocab.txt. transformers loads it with
AutoModelForSequenceClassification and AutoTokenizer, and so does
`pretrained=/tmp/sst2_hf` of configs/eat here.

Hugging Face has nothing like the exits, the pruning and the window of an EAT.
--dense leaves them out and writes its encoder with the last head, a plain BERT
whose answers differ from those of the run.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import command_line, flag_types
from model_lib import bert_sizes

RATES = ('dropout', 'attention_dropout', 'classifier_dropout')


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.export',
    description=__doc__,
    epilog=command_line.EXIT_CODES,
  )
  add = result.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--out', required=True, metavar='DIRECTORY',
      help='where to write; new or empty')  # fmt: skip
  add('--step', type=flag_types.checkpoint, default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip
  add('--dense', action='store_true',
      help='of an EAT: without its exits, pruning and window')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any]:
  """Returns (arguments, the run's config); touches no device."""
  arguments = command_line.parse_arguments(parser(), argv)
  _check_out(arguments.out)
  from train_lib import loading

  config = loading.load_own_config(arguments.workdir)
  _check_model(config, arguments)
  return arguments, config


def _check_out(out: str) -> None:
  path = os.path.abspath(out)
  if os.path.exists(path) and not os.path.isdir(path):
    raise command_line.UsageError(
      f'--out: expected a directory, {out!r} is a file'
    )
  if os.path.isdir(path) and os.listdir(path):
    raise command_line.UsageError(
      f'--out: expected a new or empty directory, got {out!r} with '
      f'{sorted(os.listdir(path))[0]!r} in it; name another'
    )
  while not os.path.exists(path):
    path = os.path.dirname(path)
  if not os.access(path, os.W_OK):
    raise command_line.UsageError(
      f'--out: expected a place to write, {path!r} is not writable'
    )


def _check_model(config: Any, arguments: Any) -> None:
  """Raises `UsageError` unless Hugging Face has such a model."""
  from eat.model import EatClassifier
  from model_lib.bert import BertClassifier
  from train_lib.classification import construct
  from train_lib.run_directory import TOKENIZER

  model = construct(config, num_classes=2)
  if not isinstance(model, (BertClassifier, EatClassifier)):
    raise command_line.UsageError(
      '--workdir: expected the run of a BertClassifier or EatClassifier, got '
      f'one of {config.model.name}'
    )
  dropped = parts(model)
  if dropped and not arguments.dense:
    raise command_line.UsageError(
      f'--workdir: expected a dense run, got an EAT with {", ".join(dropped)}, '
      'which Hugging Face does not have; --dense exports it without'
    )
  if not (pathlib.Path(arguments.workdir) / TOKENIZER).is_file():
    raise command_line.UsageError(
      f'--workdir: expected a run with its {TOKENIZER}, there is none in '
      f'{arguments.workdir!r}; a run on token ids cannot be exported'
    )


def parts(model: Any) -> list[str]:
  """What a model has and a plain BERT has not, in words."""
  words = {
    'prune_layers': 'pruning after layers {}',
    'exit_layers': 'exits at {}',
    'window': 'a window of {}',
  }
  found = []
  for name, text in words.items():
    value = getattr(model, name, ())
    if value:
      listed = value if isinstance(value, int) else ', '.join(map(str, value))
      found.append(text.format(listed))
  return found


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  from dataset_lib.errors import ConfigError

  try:
    arguments, config = parse(argv)
  except (command_line.UsageError, ConfigError) as error:
    command_line.fail(error)
  return command_line.run(lambda: run(arguments, config))


def run(arguments: Any, config: Any) -> int:
  """Reads the checkpoint, writes the directory, says what was left out."""
  import jax

  from train_lib import loading, sharding
  from train_lib.run_directory import TOKENIZER

  step = arguments.step
  task = loading.load_task(arguments.workdir, config, step)
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    loaded = loading.load_params(arguments.workdir, task, mesh, step)
  try:
    save(
      arguments.out,
      task.model,
      loaded.variables['params'],
      class_names=task.info.class_names,
      tokenizer=pathlib.Path(arguments.workdir) / TOKENIZER,
    )
  except ValueError as error:
    command_line.fail(f'--workdir: Hugging Face has no such model: {error}')
  print(f'step {loaded.step}, written: {arguments.out}')
  for part in parts(task.model):
    print(f'left out: {part}')
  return command_line.OK


def save(
  directory: str, model: Any, params: Mapping[str, Any], **options: Any
) -> None:
  """Writes the encoder and the last head of a model.

  Args:
    directory: see `model_lib.huggingface.save`.
    model: a `BertClassifier` or an `EatClassifier`.
    params: its parameters.
    **options: class names and tokenizer of `model_lib.huggingface.save`.

  Raises:
    ValueError: Hugging Face has no such model.
  """
  import jax

  from model_lib import huggingface

  fields = encoder_fields(model)
  kind = 'bert' if fields['type_vocab_size'] else 'distilbert'
  arrays = jax.device_get(dense_params(params))
  huggingface.save(directory, kind, fields, arrays, **options)


def encoder_fields(model: Any) -> dict[str, Any]:
  """The fields of `model_lib.huggingface.save` as a model has them."""
  names = (*bert_sizes.DEFAULTS, *RATES)
  known = {name: getattr(model, name) for name in names}
  return known | dataclasses.asdict(model.sizes())


def dense_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters without those of early heads and learned token scorers."""
  return {
    name: value
    for name, value in params.items()
    if not name.startswith(('exit_', 'scorer_'))
  }


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
