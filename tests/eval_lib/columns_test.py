"""Certificates of label columns: the rows and classes of one task."""

import json

import jax
import jax.numpy as jnp
import pytest

from core.errors import ConfigError
from serve_lib.classifier import CertificateFile
from tests.contexts import evaluator_of
from tests.dataset_lib import corpora, word_rows
from tests.eval_lib.calibration_test import VARIABLES
from tests.eval_lib.certificate_test import build, read


def of_tasks(variables, batch):
  """Two heads for 3 and 2 classes, of which the last is surer."""
  seen = batch['tokens'].sum(1, keepdims=True).astype(jnp.float32)
  logits = jnp.sin(seen * jnp.arange(1.0, 6.0)[None])
  return {'logits': jnp.stack([logits, 3 * logits], 1)}


def test_a_column_has_a_certificate_of_its_own_rows(tmp_path):
  corpora.tokenizer(tmp_path / 'vocabulary', word_rows.VOCABULARY)
  lines = [
    f'w{n % 30} w{n // 30},{"" if n % 5 == 0 else "abc"[n % 3]},{"xy"[n % 2]}'
    for n in range(200)
  ]
  path = word_rows.write(tmp_path / 'own.csv', ['text,kind,size', *lines])
  data = dict(
    name='texts', path=str(path), kind='tasks', label='kind+size',
    tokenizer=str(tmp_path / 'vocabulary'),
  )  # fmt: skip
  context = dict(outputs=jax.jit(of_tasks), workdir=tmp_path, batch_size=64)
  own = {}
  for column, rows in (('kind', 160), ('size', 200)):
    entry = dict(split='all', column=column, risk='disagreement', epsilon=0.4)
    built = evaluator_of('certificate', data, context, **entry)
    assert built.measure(VARIABLES).get('unlabelled', 0) == 200 - rows
    found = json.loads((tmp_path / f'certificate.{column}.json').read_text())
    own[column] = found['sources']['']
    assert own[column]['rows'] == rows
    file = CertificateFile(str(tmp_path), column=column)
    assert file.sources[''].tau == own[column]['tau']
    assert f'--evals=certificate_{column}' in file.repair()
  # That of a model and data of this task alone.
  only = tmp_path / 'only'
  alone = dict(
    outputs=jax.jit(lambda v, b: {'logits': of_tasks(v, b)['logits'][..., 3:]}),
    workdir=only, batch_size=64,
  )  # fmt: skip
  only.mkdir()
  one = data | dict(kind='class', label='size')
  evaluator_of('certificate', one, alone, **entry | {'column': ''}).run(
    VARIABLES
  )
  expected = read(only)['sources']['']
  assert own['size'] | {'dataset': {}} == expected | {'dataset': {}}
  with pytest.raises(ConfigError, match=r"column: .*\['kind', 'size'\]"):
    evaluator_of('certificate', data, context, split='all')
  with pytest.raises(ConfigError, match='column: '):
    build(tmp_path, column='kind')
