"""Writes small data sets as TFDS prepares them; a process of its own.

The tests then read them without TensorFlow's import.
"""

import os
import sys

import numpy as np
import tensorflow_datasets as tfds

CLASSES = {
  'sst2': ('negative', 'positive'),
  'mnli': ('entailment', 'neutral', 'contradiction'),
  'rte': ('not_entailment', 'entailment'),
}


def write(folder, name, features, splits, file_format, config='', keys=None):
  """Writes one version of a data set; `splits` has lists of records."""
  version = '1.0.0' if name != 'glue' else '2.0.0'
  place = os.path.join(folder, name, config, version)
  os.makedirs(place)
  identity = tfds.core.dataset_info.DatasetIdentity(
    name=name, version=tfds.core.Version(version), data_dir=place,
    module_name='', config_name=config or None,
  )  # fmt: skip
  info = tfds.core.DatasetInfo(
    builder=identity,
    features=tfds.features.FeaturesDict(features),
    supervised_keys=keys,
  )
  writer = tfds.core.SequentialWriter(
    info, max_examples_per_shard=8, file_format=file_format
  )
  writer.initialize_splits(list(splits))
  for split, records in splits.items():
    writer.add_examples({split: records})
  writer.close_all()


def images(root):
  """Constant images with one label, and with several, in both formats."""
  text = tfds.features.Text()
  image = tfds.features.Image(shape=(None, None, 3), encoding_format='png')
  label = tfds.features.ClassLabel(names=['ant', 'bee', 'cat'])
  classes = tfds.features.Sequence(tfds.features.ClassLabel(num_classes=18291))

  def record(value, **fields):
    pixels = np.full((9, 12, 3), value, np.uint8)
    return {'image': pixels, 'note': 'x', **fields}

  tiny = {
    'train': [record(n, label=n % 3) for n in range(20)],
    'test': [record(100 + n, label=n % 3 if n != 5 else -1) for n in range(7)],
  }
  rows = (range(1000 * n, 1000 * n + n % 3) for n in range(10))
  many = [record(n, labels=[*labels]) for n, labels in enumerate(rows)]
  for file_format in ('array_record', 'tfrecord'):
    for name, key, feature, splits in (
      ('tiny', 'label', label, tiny),
      ('many', 'labels', classes, {'train': many}),
    ):
      features = {'image': image, key: feature, 'note': text}
      folder = os.path.join(root, file_format)
      write(folder, name, features, splits, file_format, keys=('image', key))


def glue(folder, task, texts, file_format, **splits):
  """As tensorflow_datasets/text/glue.py has them, with fewer rows."""
  names = CLASSES.get(task)
  label = tfds.features.ClassLabel(names=list(names)) if names else np.float32
  features = {name: tfds.features.Text() for name in texts}
  features |= {'label': label, 'idx': np.int32}
  rows = {
    split: [
      dict.fromkeys(texts, f'w{i} é' if i != 9 else ' ')
      | {'label': label, 'idx': i}
      for i, label in enumerate(labels)
    ]
    for split, labels in splits.items()
  }
  write(folder, 'glue', features, rows, file_format, task)


def texts(folder, name, config, file_format, records):
  features = {key: tfds.features.Text() for key in records[0]}
  write(folder, name, features, {'train': records}, file_format, config)


def main(root):
  images(root)
  pair = 'sentence1', 'sentence2'
  glue(root, 'sst2', ['sentence'], 'tfrecord',
       train=[i % 2 for i in range(20)], validation=[1, 0, 1],
       test=[-1, -1])  # fmt: skip
  glue(root, 'mnli', ['premise', 'hypothesis'], 'array_record', train=[0, 1],
       validation_matched=[2, 1], validation_mismatched=[0, 2])  # fmt: skip
  glue(root, 'stsb', pair, 'tfrecord', train=[0.5, 4.25], test=[-1.0])
  glue(root, 'rte', pair, 'tfrecord', train=[0])
  pages = [f'w{n} w1.\n\n W2 w3.' if n != 3 else '' for n in range(20)]
  texts(root, 'wikipedia', 'tiny', 'array_record',
        [{'title': 'w9', 'text': page} for page in pages])  # fmt: skip
  texts(root, 'pg19', '', 'tfrecord',
        [{'book_text': 'w1\nw2.\n\nW3 w4\n w5.', 'note': 'w6'}])  # fmt: skip
  texts(root, 'other', '', 'tfrecord', [{'first': 'a', 'second': 'b'}])


if __name__ == '__main__':
  main(sys.argv[1])
