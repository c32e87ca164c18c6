"""Measures a trained model: the tapes of an AdaTape, an ALBERT's iterations.

  python -m benchmarks.analyze --workdir=/tmp/digits
  python -m benchmarks.analyze --workdir=/tmp/tense \\
      --treebank=en_ewt-ud-dev.conllu

The run's model decides what is written into --out, and which flags are legal.
Of an AdaTape summary.csv, lengths.csv, bank.csv, classes.csv and examples.csv,
and pictures: a heatmap of the patches read, the selection distribution, tape
lengths, the images of the shortest and the longest tapes, and of one each the
patches that its tape has, with their steps (tape.png; not of a learnable bank).
Of an ALBERT, in pretraining or fine-tuning:
  iterations.csv  by kind of token
  similarity.csv  and a picture: cosine of the states before and after each
                  iteration, 1 for a halted token
  labels.csv      by dependency label; marked if mean > mean of labels + std
  sentences.html  tokens coloured by iterations
"""

import dataclasses
import os
from typing import Annotated, Any

from annotated_types import Predicate

from benchmarks import command, iteration_report, tape_report
from core.errors import ConfigError
from core.fields import flag
from eval_lib import report
from launch import command_line
from launch.command_line import Count, Positive
from train_lib import loading
from train_lib.task import construct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Run):
  split: str = flag('ALBERT: validation; AdaTape: that of its evaluation', '')
  out: str = flag('default: analysis/ in the workdir', '', 'DIRECTORY')
  treebank: Annotated[
    str,
    Predicate(lambda path: not path or os.path.isfile(path)),
    'a CoNLL-U file',
  ] = flag('ALBERT: with dependency labels, CoNLL-U or .gz', '', 'FILE')
  # Labels with fewer words are left out.
  label_words: Positive = flag('ALBERT: least words of a label', 20, 'WORDS')
  sentences: Count = flag('ALBERT: rows of sentences.html', 8, 'ROWS')
  images: Positive = flag(
    'AdaTape: images shown of the shortest, and of the longest tapes', 5
  )


# The flags of one report; MODEL is the class of its models.
REPORTS: dict[Any, tuple[str, ...]] = {
  iteration_report: ('treebank', 'label_words', 'sentences'),
  tape_report: ('images',),
}


def write(flags: Flags) -> None:
  config = loading.load_config(flags.workdir)
  model = construct(config, num_classes=2)
  module = next((m for m in REPORTS if isinstance(model, m.MODEL)), None)
  if module is None:
    expected = 'a run of an ALBERT of albert_act, or of an AdaTape'
    raise ConfigError('--workdir', config.model.name, expected)
  expected = f'nothing, not a flag for a run of {config.model.name}'
  for other, flag_names in REPORTS.items():
    if other is not module:
      command_line.refuse(flags, flag_names, expected)
  if module is iteration_report:
    command_line.check_texts(flags.workdir)
  split = loading.split_of(config, flags.split or module.SPLIT)
  out = report.folder_of(flags.out, flags.workdir, 'analysis')
  command_line.check_place('--out', str(out))
  loaded = loading.restore(flags.workdir, config, flags.step)
  command.write_tables(out, module.write(flags, config, split, loaded, out))
  print(f'step {loaded.saved.step}, written: {out}')


main = command.reporting('analyze', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
