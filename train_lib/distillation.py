"""A run as the teacher of another one (Hinton et al. 2015)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dataset_lib.errors import ConfigError
from train_lib import loading

TEACHER = 'loss.teacher'


class Student:
  """Mixin of a Task whose `loss.teacher` is the directory of a run, or ''."""

  config: Any
  info: Any

  @functools.cached_property
  def teacher(self) -> Any:
    """The teacher, or None; ConfigError if it has other classes or images."""
    directory, info = self.config['loss']['teacher'], self.info
    if not directory:
      return None
    config = loading.load_config(directory, key=TEACHER)
    teacher = loading.restore(directory, config)
    theirs = teacher.task.info
    if theirs.num_classes != info.num_classes:
      given = f'{directory} with {theirs.num_classes} classes'
      expected = f'a run with the {info.num_classes} classes of the data set'
      raise ConfigError(TEACHER, given, expected)
    names = theirs.class_names, info.class_names
    if all(names) and names[0] != names[1]:
      pairs = enumerate(zip(*names, strict=True))
      index, (one, other) = next((i, p) for i, p in pairs if p[0] != p[1])
      given = f'{directory}, whose class {index} is {one!r}'
      raise ConfigError(TEACHER, given, f'a run whose class is {other!r}')
    shapes = theirs.input_shape, info.input_shape
    if info.input_key == 'image' and shapes[0] != shapes[1]:
      given = f'{directory} with images of {shapes[0]}'
      raise ConfigError(TEACHER, given, f'a run with images of {shapes[1]}')
    return teacher

  def init_frozen(self) -> Any:
    """Returns the teacher's parameters, if there is one."""
    if self.teacher is None:
      return {}
    mesh = jax.sharding.get_mesh()
    return dataclasses.replace(self.teacher, mesh=mesh).variables

  def teacher_logits(self, frozen: Any, batch: Any) -> Float[Array, 'B O']:
    """Returns the logits of the teacher, without noise and gradient."""
    given = frozen['params'], frozen['model_state'], batch
    return jax.lax.stop_gradient(self.teacher.task.apply(*given)[0])


def divergence(
  target: Float[Array, 'B O'], logits: Float[Array, 'B O'], temperature: float
) -> Float[Array, ' B']:
  """Returns `T^2 KL(softmax(target / T) || softmax(logits / T))`, in nats."""
  teacher = jax.nn.log_softmax(target / temperature)
  student = jax.nn.log_softmax(logits / temperature)
  kl = (jnp.exp(teacher) * (teacher - student)).sum(-1)
  return temperature**2 * kl
