"""Exit rules on recorded logits, by hand; `eat_runs_test` has tiny runs."""

import pytest

from benchmarks import exit_settings
from core.errors import ConfigError
from tests.benchmarks.command_test import parse
from tests.benchmarks.recorded import LABELS, LOGITS, fake, measured


def test_rules_by_hand():
  settings = measured(fake(LOGITS, LABELS), tau=0.73)
  exits = {
    'never': [1, 1, 1], 'patience=1': [0, 0, 0], 'confidence=0.73': [0, 1, 0],
    # H(0.9) = 0.325 and H(0.6) = 0.673 nats; margins 0.8 and 0.2.
    'entropy=0.3466': [0, 1, 0], 'entropy=0.2079': [1, 1, 1],
    'margin=0.1': [0, 0, 0], 'margin=0.7': [0, 1, 0],
  }  # fmt: skip
  assert {k: settings[k].point.exits.tolist() for k in exits} == exits
  assert 'patience=2' not in settings


@pytest.mark.parametrize('flag', ['dense', 'student'])
def test_all_runs_have_the_rows_of_the_eat(flag, monkeypatch):
  def load(name, *arguments, **rows):
    return fake(LOGITS, LABELS if name == 'EAT' else 1 - LABELS)

  monkeypatch.setattr(exit_settings, 'load', load)
  line = f'eat --workdir=/run --out=o --{flag}=/other'
  with pytest.raises(ConfigError, match='a run on the same 3 rows') as caught:
    exit_settings.sweep(parse(line))
  assert caught.value.field == f'--{flag}'


def test_choosing_settings_to_time():
  settings = measured(fake(LOGITS, LABELS))
  settings |= measured(fake(LOGITS, LABELS, variant='prune_0'))
  auto = exit_settings.choose(settings, 'auto', 'confidence=0.9')
  assert [one.name for one in auto[:2]] == ['never', 'confidence=0.9']
  # On the frontier: all leave at once (2 of 3 right), or two of them (all).
  assert {(one.point.flops, one.point.quality) for one in auto} == {
    (0.25, 2 / 3), (80 / 240, 1.0), (0.5, 2 / 3),
  }  # fmt: skip
  assert not any('prune_0' in one.name for one in auto)
  for text, wanted in (
    ('all', list(settings)), ('none', [one.name for one in auto]),
    ('prune_0/never,never,never', ['prune_0/never', 'never']),
  ):  # fmt: skip
    chosen = exit_settings.choose(settings, text, 'confidence=0.9')
    assert [one.name for one in chosen] == wanted
  with pytest.raises(ConfigError) as caught:
    exit_settings.choose(settings, 'never,x', 'never')
  assert caught.value.field == '--time'
