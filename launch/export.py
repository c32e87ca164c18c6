"""Writes a trained model as a bundle, or as a Hugging Face directory.

  python -m launch.export --workdir=/tmp/sst2_eat --bundle=/tmp/sst2_eat.bundle
  python -m launch.export --workdir=/tmp/sst2 --out=/tmp/sst2_hf

A bundle is one file that launch.predict answers from, without the Python code
of the model: see docs/serving.md, also for --serve and the other options.

--out is for models of texts: transformers loads the directory, configs/eat with
`pretrained=/tmp/sst2_hf`, configs/albert_act with `checkpoint=/tmp/sst2_hf`.
transformers has no exits, pruning or window of an EAT, and no halting of an
ALBERT. --dense leaves them out: an EAT becomes a BERT with the last head, an
ALBERT runs all iterations for every token. The answers differ from the run's.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

from core import files
from core.errors import ConfigError
from core.fields import flag
from launch import command_line, serving

# Files of a run that a bundle repeats.
RECORDS = ('calibration*.json', 'certificate*.json')
# Fields of a model that transformers does not have.
PARTS = {
  'prune_layers': 'pruning after layers {}',
  'exit_layers': 'exits at {}',
  'window': 'a window of {}',
  'rule': "halting by the rule {} with the parameters 'score'",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(serving.ModelFlags):
  """Flags of an export."""

  bundle: str = flag('where to write a bundle', '', 'FILE')
  out: str = flag(
    'where to write as of Hugging Face; new or empty', '', 'DIRECTORY'
  )
  dense: bool = flag('leave out parts that transformers does not have', False)

  def __post_init__(self):
    if bool(self.out) == bool(self.bundle):
      raise ConfigError('out', self.out, 'either --out or --bundle, required')
    names = [field.name for field in dataclasses.fields(serving.ModelFlags)]
    names = ['dense'] if self.bundle else [*{*names} - {'workdir', 'step'}]
    command_line.refuse(self, names, 'nothing, as the other form has none')


def run(flags: Flags) -> None:
  """Reads the checkpoint and writes it."""
  (export_bundle if flags.bundle else export_model)(flags)


def export_bundle(flags: Flags) -> None:
  """Writes the file that `launch.predict --bundle` reads."""
  path = pathlib.Path(flags.bundle)
  if path.is_dir():
    raise ConfigError('--bundle', flags.bundle, 'a file')
  command_line.check_place('--bundle', str(path.parent))
  from serve_lib import bundle
  from serve_lib.programs import Programs
  from train_lib import checkpoint_io
  from train_lib.run_directory import load_info

  saved = checkpoint_io.find(flags.workdir, flags.step)
  chain, policy, grid = serving.load_run(flags)
  info = dataclasses.asdict(load_info(flags.workdir))
  about: dict[str, Any] = {'step': saved.step, 'contract': info}
  for pattern in RECORDS:  # of each task, if there are several
    for file in sorted(pathlib.Path(flags.workdir).glob(pattern)):
      about[file.name] = files.read_object(file)
  started = time.perf_counter()
  count = bundle.write(path, Programs(chain, grid), policy, about)
  seconds, size = time.perf_counter() - started, path.stat().st_size / 1e6
  print(
    f'step {saved.step}, written: {path}, {count} programs, {size:.1f} MB, in '
    f'{seconds:.1f} s'
  )


def export_model(flags: Flags) -> None:
  """Writes the directory; prints what was left out."""
  command_line.check_place('--out', flags.out, is_new=True)
  from model_lib import convert
  from model_lib.bert import TextEncoder
  from train_lib import loading
  from train_lib.run_directory import TOKENIZER
  from train_lib.task import construct

  config = loading.load_config(flags.workdir)
  model: Any = construct(config, num_classes=2)
  if not isinstance(model, TextEncoder):
    expected = 'the run of a BERT, an EAT or an ALBERT of albert_act'
    raise ConfigError('--workdir', config.model.name, expected)
  parts = {name: vars(model).get(name, ()) for name in PARTS}
  if rule := parts['rule']:
    parts['rule'] = type(rule).__name__ if rule.SCORED else ''
  dropped = [
    PARTS[name].format(str(value).strip('(,)'))
    for name, value in parts.items()
    if value
  ]
  if dropped and not flags.dense:
    expected = 'a dense run as Hugging Face has (--dense exports it as one)'
    raise ConfigError('--workdir', ', '.join(dropped), expected)
  command_line.check_texts(flags.workdir)
  loaded = loading.restore(flags.workdir, config, flags.step)
  params, info = loaded.variables['params'], loaded.task.info
  tokenizer = pathlib.Path(flags.workdir, TOKENIZER)
  try:
    with files.writing(flags.out):
      convert.save_model(
        flags.out, loaded.task.model, params, info.class_names, tokenizer,
        info.label_kind,
      )  # fmt: skip
  except ValueError as error:
    command_line.fail(f'--workdir: Hugging Face has no such model: {error}')
  print(f'step {loaded.saved.step}, written: {flags.out}')
  for part in dropped:
    print(f'left out: {part}')
  if parts['rule']:
    iterations = model.max_iterations
    print(f'the model runs all {iterations} iterations for every token')


main = command_line.Command('export', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
