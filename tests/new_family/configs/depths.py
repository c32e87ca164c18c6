"""Digits by a Mixture of Depths."""

from configs.adatape import digits


def get_config(arg=''):
  c = digits.get_config('model=vit')
  c.model.name = 'depths:Depths'
  return c
