"""Rows of made-up words: their vocabulary, data sets of them, what is read."""

WORDS = [f'w{number}' for number in range(30)]
VOCABULARY = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '"', '(', ')', *WORDS]


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
