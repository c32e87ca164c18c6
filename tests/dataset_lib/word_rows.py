"""Rows of made-up words: vocabulary, files, data sets, what is read."""

import gzip

from dataset_lib import builder

WORDS = [f'w{number}' for number in range(30)]
VOCABULARY = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '"', '(', ')', *WORDS]


def config(root, task, name='glue', **others):
  """Of the data set `name` in the folder of the fixture `root`."""
  places = dict(directory=str(root), tokenizer=str(root.parent / 'vocabulary'))
  return dict(name=name, task=task, **places, **others)


def opened(given, split='train'):
  return builder.build_source(given, split)


def read(source):
  """(words between [CLS] and the last [SEP], label) of every record."""
  given = []
  for index in range(len(source)):
    record = source.record(index)
    words = [VOCABULARY[token] for token in record['tokens']]
    assert (words[0], words[-1]) == ('[CLS]', '[SEP]')
    given.append((' '.join(words[1:-1]), record['label']))
  return given


def write(path, rows, end='\n'):
  """Writes a file of rows, gzipped by its suffix."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = (row if isinstance(row, bytes) else row.encode() for row in rows)
  data = b''.join(line + end.encode() for line in lines)
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  return path


def probing(root, task='past_present', **others):
  return config(root, task, name='probing', **others)
