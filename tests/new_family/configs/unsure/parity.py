"""Parity of 8 symbols."""

from configs.pooled import parity


def get_config(arg=''):
  c = parity.get_config()
  c.task, c.model = 'unsure.task:Unsure', dict(name='unsure.model:Linear')
  return c
