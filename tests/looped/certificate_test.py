"""Certificates of solvers: their frequency of violations, and serving them."""

import json
import warnings

import jax
import ml_collections
import numpy as np
import pytest
import scipy.special

from core.errors import ConfigError
from looped import certificate
from looped.certificate import Record, certify
from looped.rules import AllIterations, Score, replay
from tests.contexts import evaluator_of
from tests.looped import solvers
from tests.looped.serving_test import engine_of
from tests.looped.solvers import LIMIT, Solver
from train_lib.task import ServedRun

EPSILON, DELTA = 0.05, 0.1
DATA = solvers.DATA | {'name': 'looped.data:Generated', 'data_seed': 1}


def drawn(seed, rows=300):
  """Two iterations, of which the second is right in most rows.

  The first is wrong, with a uniform probability: stopping there loses the row.
  """
  rng = np.random.default_rng(seed)
  scores = np.stack([rng.logistic(size=rows), np.full(rows, np.inf)], 1)
  right = np.stack([np.zeros(rows, bool), rng.random(rows) < 0.8], 1)
  return Record(scores, right)


def share_lost(rule):
  """The true share of lost rows, of those that the second iteration solves."""
  if isinstance(rule, AllIterations):
    return 0.0
  return 1 - rule.tau + min(rule.give_up, rule.tau)


@pytest.mark.parametrize('method', ['sequence', 'pareto'])
def test_certificates_are_violated_at_most_as_often_as_delta(
  method, monkeypatch
):
  taus = 1 - np.append(0.0, np.geomspace(1e-3, 0.3, 40))
  monkeypatch.setattr(certificate, 'TAUS', taus.tolist())
  monkeypatch.setattr(certificate, 'GIVE_UPS', np.linspace(0.0, 0.05, 6))
  chosen = [certify(drawn(n), method, EPSILON, DELTA, 1) for n in range(200)]
  lost = np.array([share_lost(one.rule) for one in chosen])
  most = 200 * DELTA + 2.33 * np.sqrt(200 * DELTA * (1 - DELTA))
  assert (lost > EPSILON).sum() <= most
  assert (lost > 0).mean() > 0.8  # most stop some row early
  bounds = np.array([one.bound for one in chosen if one.bound is not None])
  assert (bounds <= EPSILON).all()
  assert len(bounds) > 190
  # Without a test, thresholds chosen by the share on the rows are worse.
  rows = [drawn(n) for n in range(200)]
  logits = scipy.special.logit(taus)[:, None]
  shares = [r.scores[r.right[:, 1], 0] >= logits for r in rows]
  plain = [taus[(x.mean(1) <= EPSILON)].min() for x in shares]
  assert (1 - np.array(plain) > EPSILON).sum() > most


def test_stops_are_those_of_the_served_rule():
  rng = np.random.default_rng(0)
  scores = rng.uniform(-40, 40, (50, 6)).astype(np.float32)
  scores[:20] = rng.uniform(13.0, 18.0, (20, 6))  # where sigmoids are about 1
  rows = Record(scores, rng.random((50, 6)) < 0.5)
  pairs = (1.0, 0.0), (1 - 1.5e-6, 0.3), (0.8, 1e-6), (0.4, 0.6), (0.0, 0.0)
  tried = [Score(tau, give_up, 3) for tau, give_up in pairs]
  stopped = certificate.stops_of(rows, [*tried, AllIterations()])
  assert (stopped[-1] == 5).all()
  assert (stopped[0] == 5).all()  # never sure
  zeros = np.zeros((50, 6, 1), int)
  for stops, rule in zip(stopped, tried, strict=False):
    np.testing.assert_array_equal(
      stops + 1, replay(rule, scores, zeros, zeros[:, 0])
    )
    sure, unlikely = scipy.special.logit(
      [rule.tau, min(rule.tau, rule.give_up)]
    )
    for stop, values in zip(stops, scores.tolist(), strict=True):
      halts = (n for n in range(6) if values[n] >= sure)
      hopeless = (n for n in range(2, 6) if values[n] < unlikely)
      assert stop == min(next(halts, 5), next(hopeless, 5))


def measured(workdir, variables, rows=400, **entry):
  """The results of the evaluator on puzzles of the solver."""
  task = solvers.task_of(solvers.built(Solver)[0])

  compiled = jax.jit(task.outputs)

  def outputs(variables, batch):
    return compiled(*variables.values(), batch)

  context = dict(
    outputs=outputs, workdir=workdir, batch_size=50, train_split='train'
  )
  # As a run has it; the certificate stores it as JSON.
  data = ml_collections.FrozenConfigDict(DATA | {'test_examples': rows})
  kind = 'looped.certificate:Evaluator'
  built = evaluator_of(kind, data, context, **{'split': 'test', **entry})
  return built.run(variables)


def guaranteed(workdir, variables):
  task = solvers.task_of(solvers.built(Solver)[0])
  run = ServedRun(str(workdir))
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    return task.serve(variables, {'setting': 'guaranteed'}, run)


@pytest.mark.slow
def test_a_certified_rule_is_served(tmp_path, caplog):
  _, variables = solvers.built(Solver)
  results = measured(tmp_path, variables)
  assert results['lost'] == 0
  assert 0 < results['bound'] <= 0.01
  assert results['saved'] > 0.2
  chain, policy = guaranteed(tmp_path, variables)
  assert not caplog.records
  (name,) = {*policy.certified.values()}
  assert chain.variants == ('served', name)
  with engine_of((chain, policy)) as engine:
    answers = engine.predict(solvers.typed())
    policy.monitor.drift.drifted = True
    [drifting] = engine.predict(solvers.typed(1))
  assert {a.fields['exit_reason'] for a in answers} == {'halted'}
  assert all(answer.fields['verified'] for answer in answers)
  assert np.mean([a.fields['depth'] for a in answers]) < 0.8 * LIMIT
  assert drifting.fields['exit_reason'] == 'last iteration'
  with pytest.raises(ConfigError, match='no certificate'):
    guaranteed(tmp_path / 'none', variables)
  path = tmp_path / 'certificate.json'
  content = json.loads(path.read_text())
  assert content['sources']['']['model']['limit'] == LIMIT
  content['sources']['']['model']['limit'] = LIMIT - 2
  path.write_text(json.dumps(content))
  with pytest.raises(ConfigError, match=f'expected {LIMIT}, those of the run'):
    guaranteed(tmp_path, variables)


@pytest.mark.slow
def test_without_a_certified_rule_all_iterations_are_served(tmp_path):
  _, variables = solvers.built(Solver)
  results = measured(tmp_path, variables, rows=100)
  assert results == {'saved': 0.0, 'lost': 0.0, 'rows_needed': 299}
  entry = json.loads((tmp_path / 'certificate.json').read_text())['sources']['']
  assert entry['model']['rule'] == {'name': 'looped.rules:AllIterations'}
  with engine_of(guaranteed(tmp_path, variables)) as engine:
    [answer] = engine.predict(solvers.typed(1))
  assert answer.fields['depth'] == LIMIT
