"""Shards of `tf.train.Example`, written without TensorFlow."""

import cv2
import numpy as np

from dataset_lib.records.sharded import framed

SIDE = 16


def jpeg(value):
  image = np.full((SIDE, SIDE + 4, 3), value, np.uint8)
  return cv2.imencode('.jpg', image)[1].tobytes()


def example(image, labels, label_key='image/class/label', copies=1):
  """A serialized example; no label feature if `labels` is None."""
  from tensorflow_datasets.proto import tf_example_pb2

  message = tf_example_pb2.Example()
  feature = message.features.feature
  feature['image/encoded'].bytes_list.value.extend([image] * copies)
  if labels is not None:
    feature[label_key].int64_list.value.extend(labels)
  return message.SerializeToString()


def write(path, records):
  """Writes a shard in the format that its name ends with."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == '.tfrecord':
    path.write_bytes(b''.join(map(framed, records)))
    return
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(record)
  writer.close()
