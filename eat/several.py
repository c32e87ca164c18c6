"""Several tasks by one model: fine-tuning of what `eat.several_policy` serves.

All tasks share the encoder and the poolers of its heads; the last layer of a
head is one matrix of the classes of all tasks, cut by task.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from core.errors import ConfigError
from dataset_lib.source import labels_of
from eat.task import FineTune, retention
from eval_lib.metrics import ByClass
from train_lib.terms import Batch, Forward


class SeveralTasks(FineTune):
  """The mean of the losses of `FineTune` of each task, on the rows it labels.

  Metrics end in `_<task>`; `accuracy` is the mean over the tasks.
  """

  SERVE = 'eat.several_policy:serve'
  MULTI_LABEL = True  # of which a task has one

  def build_model(self):
    """See the base; the data must have tasks."""
    if not self.info.tasks:
      expected = "'tasks', of label columns as 'domain+language'"
      raise ConfigError('dataset.kind', self.info.label_kind, expected)
    return super().build_model()

  def cheaper(self):
    """Returns nothing: one pass has one pruning, whatever a task certifies."""
    return ()

  def masks(self, batch):
    """Returns also 'labelled_<task>': 1 for the rows with its label, `[B]`."""
    batches = {name: self._of_task(batch, name) for name in self.info.tasks}
    masks = {f'labelled_{name}': x['mask'] for name, x in batches.items()}
    return super().masks(batch) | masks

  def terms(self, forward):
    """Returns the terms of each task, over the rows that it labels."""
    target = None
    if forward.frozen:
      target = super().teacher_logits(forward.frozen, forward.batch)
    of_one, count = super().terms, len(self.info.tasks)
    return tuple(
      dataclasses.replace(
        term, value=term.value / count, over=f'labelled_{name}'
      )
      for name in self.info.tasks
      for term in of_one(self._cut(forward, name, target))
    )

  def teacher_logits(self, frozen, batch):
    """Returns the logits of one task, which `terms` has computed and cut."""
    return frozen['logits']

  def metrics(self, forward):
    """Returns the metrics of each task, and the mean of their accuracies."""
    metrics, hits = dict[str, Any](), []
    for name in self.info.tasks:
      part = self._cut(forward, name)
      stats = super().metrics(part)
      stats.pop('retention', None)  # of all rows, below
      metrics |= {f'{k}_{name}': v for k, v in stats.items()}
      correct = self.correct(part.logits.argmax(-1), part.batch)
      hits.append((correct, part.batch['mask']))
    values, mask = map(jnp.concatenate, zip(*hits, strict=True))
    tasks = jnp.repeat(jnp.arange(len(hits)), len(hits[0][0]))
    metrics['accuracy'] = ByClass.of(values, mask, tasks, len(hits))
    return metrics | retention(forward)

  def _cut(self, forward: Forward, name: str, target: Any = None) -> Forward:
    """Returns a forward pass as that of one task; `target`: the teacher's."""
    classes, out = self.info.tasks[name], dict(forward.out)
    if 'exits' in out:
      out['exits'] = out['exits'][..., classes]
    targets = tuple((s, self._of_task(b, name)) for s, b in forward.targets)
    return dataclasses.replace(
      forward, logits=forward.logits[..., classes], out=out, targets=targets,
      batch=self._of_task(forward.batch, name),
      frozen={} if target is None else {'logits': target[..., classes]},
    )  # fmt: skip

  def _of_task(self, batch: Batch, name: str) -> dict[str, Any]:
    """Returns a batch with the labels of one task, and its rows."""
    label = labels_of(batch['label'], self.info.tasks[name])
    return {**batch, 'label': label, 'mask': batch['mask'] * (label >= 0)}
