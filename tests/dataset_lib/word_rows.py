"""Rows of made-up words: vocabulary, files, data sets, what is read."""

import gzip

WORDS = [f'w{number}' for number in range(30)]
VOCABULARY = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '"', '(', ')', *WORDS]


# The third column of four is something that the task was made with.
SENTEVAL = [
  'tr\tPRES\tw1 w2',
  'tr\tPAST\tseen\tw3 "w4',
  'tr\tPRES\tw5',
  'va\tPAST\tw6',
  'te\tPRES\tw7',
  'te\tPAST\tw8 w9',
]


def config(root, task, name='glue', **others):
  """Of the data set `name` in the folder of the fixture `root`."""
  return dict(
    name=name,
    task=task,
    directory=str(root),
    tokenizer=str(root.parent / 'vocabulary'),
    **others,
  )


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
  path.parent.mkdir(exist_ok=True)
  data = b''.join(
    (row if isinstance(row, bytes) else row.encode()) + end.encode()
    for row in rows
  )
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  return path


def probing(root, task='past_present', **others):
  return config(root, task, name='probing', **others)


def read_classes(source):
  """(words, name of the class) of every record."""
  names = source.info.class_names
  return [(words, names[label]) for words, label in read(source)]
