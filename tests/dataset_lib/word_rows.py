"""Rows of made-up words: vocabulary, files, data sets, what is read."""

import gzip

from dataset_lib import builder

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
# GLUE's official files: header, rows and their labels.
OFFICIAL = {
  'cola': (None, ['gj04\t1\t\tw1 w2', 'gj04\t0\t*\tw3'], [1, 0]),
  'sst2': ('sentence\tlabel', ['w1 w2\t1', 'w3\t0'], [1, 0]),
  'mrpc': ('\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String',
           ['1\t7\t8\tw1\tw2', '0\t9\t10\tw3\tw4'], [1, 0]),
  'qqp': ('id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate',
          ['1\t2\t3\tw1\tw2\t1', '2\t2\t3\tw3\tw4\t0'], [1, 0]),
  'stsb': ('index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\t'
           'sentence1\tsentence2\tscore',
           ['0\tg\tf\t2012\t1\tn\tn\tw1\tw2\t4.75',
            '1\tg\tf\ty\t1\tn\tn\tw3\tw4\t0'], [4.75, 0.0]),
  'mnli': ('index\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\t'
           'gold_label',
           ['0\tg\t(w0)\tw1\tw2\tneutral\tcontradiction',
            '1\tg\t(w0)\tw3\tw4\tneutral\tentailment'], [2, 0]),
  'qnli': ('index\tquestion\tsentence\tlabel',
           ['0\tw1\tw2\tnot_entailment', '1\tw3\tw4\tentailment'], [1, 0]),
  'rte': ('index\tsentence1\tsentence2\tlabel',
          ['0\tw1\tw2\tentailment', '1\tw3\tw4\tnot_entailment'], [0, 1]),
  'wnli': ('index\tsentence1\tsentence2\tlabel',
           ['0\tw1\tw2\t1', '1\tw3\tw4\t0'], [1, 0]),
}  # fmt: skip


def config(root, task, name='glue', **others):
  """Of the data set `name` in the folder of the fixture `root`."""
  return dict(
    name=name,
    task=task,
    directory=str(root),
    tokenizer=str(root.parent / 'vocabulary'),
    **others,
  )


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
