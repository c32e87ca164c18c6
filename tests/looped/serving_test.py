"""Serving solvers: answers of a plain call, readers, bundles, HTTP."""

import asyncio
import functools
import io
import json
import time
import types

import httpx2
import jax
import numpy as np
import pytest

from launch import predict
from looped import rules
from looped.maze import Maze
from looped.model import LoopedModel
from looped.policy import PuzzleReader, forms_of
from looped.sudoku import Sudoku
from serve_lib import bundle, http
from serve_lib.chain import Failure, Grid
from serve_lib.engine import Engine
from serve_lib.programs import Programs
from tests.looped import solvers
from tests.looped.solvers import LIMIT, PUZZLE, Solver, puzzles, served, typed
from tests.serve_lib import bundle_test, toy

RULES = {
  'score': rules.Score(0.5), 'unchanged': rules.Unchanged(3),
  'verified': rules.Verified(PUZZLE), 'all': rules.AllIterations(),
}  # fmt: skip
BACKENDS = pytest.mark.parametrize('backend', ['xla', 'onnxruntime'])
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def engine_of(parts, backend='xla', **settings):
  if backend == 'onnxruntime':
    pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
  return Engine(*parts, (1,), (1, 4), backend=backend, **settings)


def record(kind, attempt=0):
  """Scores `[R, N]` and answers `[R, N, S]` of a plain call, of one form."""
  model, variables = solvers.built(kind)
  form = forms_of(PUZZLE, attempt + 1)[attempt]
  tokens = np.stack([form.apply(e.question) for e in puzzles()])
  call = jax.jit(solvers.task_of(model).outputs)
  outputs = call(*variables.values(), {'tokens': tokens})
  scores = np.asarray(outputs['logits'][..., 1])
  return scores, np.asarray(outputs['answers']), tokens


def expected_of(kind, rule, attempts=1):
  """[(iterations, board)]: the earliest attempt, of several the best score."""
  candidates = []
  for attempt in range(attempts):
    scores, answers, tokens = record(kind, attempt)
    steps = rules.replay(rule, scores, answers, tokens)
    for row, n in enumerate(steps):
      form = forms_of(PUZZLE, attempt + 1)[attempt]
      board = form.undo(answers[row, n - 1])
      candidates.append((row, n, -scores[row, n - 1], PUZZLE.write(board)))
  firsts = [min(c for c in candidates if c[0] == r) for r in range(len(tokens))]
  return [(n, board) for _, n, _, board in firsts]


@BACKENDS
@pytest.mark.parametrize(('kind', 'options'), [
  (LoopedModel, dict(rule='score', tau=0.5)),
  slow(LoopedModel, dict(rule='score', tau=0.5, iterations=3)),
  (LoopedModel, dict(rule='score', tau=0.5, attempts=3, iterations=2)),
  slow(LoopedModel, dict(rule='unchanged', patience=3)),
  slow(Solver, dict(rule='verified')),
  (Solver, dict(rule='verified', attempts=4)),
  slow(Solver, dict(rule='unchanged', patience=3)),
  slow(Solver, dict(rule='all', iterations=2)),
])  # fmt: skip
def test_a_row_is_answered_as_if_it_were_alone(backend, kind, options):
  rule, attempts = RULES[options['rule']], options.get('attempts', 1)
  expected = expected_of(kind, rule, attempts)
  different = len({n for n, _ in expected})
  assert different >= 3 or options['rule'] == 'all'
  with engine_of(served(kind, **options), backend, max_pending=9) as engine:
    policy, mixed = engine.policy, []
    plain = policy.decide

    def decide(stage, rows, outputs):
      steps = outputs['steps'][outputs['running']] if stage else ()
      mixed.append(len({*steps}) > 1)
      return plain(stage, rows, outputs)

    policy.decide = decide
    for _ in range(5):  # which rows meet is a matter of time
      answers = engine.predict(typed() * 2)[-len(expected) :]
      if any(mixed):
        break
    alone = [engine.predict([text])[0] for text in typed(3)]
  assert any(mixed) or different < 3 or 'iterations' in options
  for (steps, board), answer in zip(expected, answers, strict=True):
    assert (answer.fields['iterations'], answer.label) == (steps, board)
  for one, other in zip(alone, answers, strict=False):
    assert one.label == other.label
    assert one.fields['score'] == pytest.approx(other.fields['score'], abs=1e-5)


def test_reasons_of_an_exit():
  """An attempt that gave up does not win, though its score rises later."""
  scores = record(Solver)[0][:, 0]
  for attempts in (1, 2):
    options = dict(rule='score', tau=0.9, give_up=float(1 / (1 + np.exp(4))))
    with engine_of(served(Solver, attempts=attempts, **options)) as engine:
      answers = engine.predict(typed())
    given_up = np.array(
      [a.fields['exit_reason'] == 'given up' for a in answers]
    )
    assert 0 < given_up.sum() < len(scores)
    for answer, is_given_up in zip(answers, given_up, strict=True):
      assert answer.fields['verified'] != is_given_up
    others = [record(Solver, n)[0][:, 0] < -4.0 for n in range(attempts)]
    assert (given_up == np.all(others, 0)).all()
  reasons = engine.monitor.snapshot()['reasons']
  assert reasons == {'given up': given_up.sum(), 'halted': (~given_up).sum()}
  # Where none halts, one that was not given up is the answer, if there is one.
  with engine_of(
    served(Solver, attempts=2, **options | {'tau': 1.0})
  ) as engine:
    answers = engine.predict(typed())
  assert (np.sum(others, 0) == 1).any()
  for answer, gave_up in zip(answers, np.all(others, 0), strict=True):
    reason, steps = ('given up', 1) if gave_up else ('last iteration', LIMIT)
    assert answer.fields['exit_reason'] == reason
    assert answer.fields['iterations'] == steps
    assert answer.fields['verified'] != gave_up
  with engine_of(served(Solver, rule='all')) as engine:
    [answer] = engine.predict(typed(1))
    toy.check_schema(engine, answer.as_dict())
  assert answer.as_dict() == {
    'label': PUZZLE.write(puzzles(1)[0].answer), 'probabilities': {},
    'depth': LIMIT, 'iterations': LIMIT, 'exit_reason': 'last iteration',
    'verified': True, 'score': pytest.approx(1 / (1 + np.exp(-3.0))),
    'difficulty': 0,
  }  # fmt: skip


BAD = [
  (typed()[0][:-1], 'expected 4x4 cells, got 15'),
  ('x' * 16, 'expected the characters'),
  ('11' + '.' * 14, 'row 1 has the digit 1 more than once'),
  ('123........4....', 'the board has no solution'),
  ('.' * 16, 'the board has several solutions; add digits'),
  (7, 'expected a text, got number'),
  ({'puzzle': None}, 'expected a text, got null'),
  ({'puzzle': typed()[0], 'tokens': [1]}, "expected only the key 'puzzle'"),
  (
    {'puzzle': typed()[0], 'text': typed()[1]},
    "expected only the key 'puzzle'",
  ),
]


@pytest.fixture(scope='module')
def engine():
  with engine_of(served(Solver)) as engine:
    yield engine


def test_typed_puzzles_are_answered_line_by_line(engine):
  texts = [text for text, _ in BAD]
  items = [
    typed()[0].replace('.', '0'),
    *texts,
    {'puzzle': typed()[1], 'id': 5},
  ]
  data = '\n'.join(map(json.dumps, items)).encode()
  lines, written = predict.read_lines(io.BytesIO(data)), []
  predict.answer_all(engine, lines, written.append, 4)
  first, *middle, last = map(json.loads, written)
  assert first['label'] == PUZZLE.write(puzzles()[0].answer)
  assert (last['id'], last['verified']) == (5, True)
  for answer, (_, message) in zip(middle, BAD, strict=True):
    assert message in answer['error']


@pytest.mark.anyio
async def test_puzzles_over_http(engine, monkeypatch):
  limits = dict(
    max_pending=64, max_waiting=64, max_body_bytes=10**5, max_seconds=60.0,
    max_pixels=10_000,
  )  # fmt: skip
  service = http.Service(engine, types.SimpleNamespace(**limits))
  service.is_ready = True
  transport = httpx2.ASGITransport(service.app)
  good, plain, slow = typed()[0], PuzzleReader.convert, 'slow'

  def convert(self, value):
    time.sleep(0.5 * (value == slow))
    return plain(self, value)

  monkeypatch.setattr(PuzzleReader, 'convert', convert)
  async with httpx2.AsyncClient(transport=transport, base_url='http://a') as c:
    one = await c.post('/predict', json={'puzzle': good})
    bad = await c.post('/predict', json={'puzzle': '.' * 16})
    # A board that takes long to read holds up no other request.
    waits = asyncio.create_task(c.post('/predict', json={'puzzle': slow}))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    assert (await c.get('/healthz')).status_code == 200
    assert time.monotonic() - started < 0.4
    assert (await waits).status_code == 422
    text = (await c.get('/metrics')).text
    about = (await c.get('/')).json()
  service.close()
  assert about['options']['rule'].startswith('Score(tau=0.9')
  assert [*about['example']['POST /predict']] == ['puzzle']
  assert one.json()['label'] == PUZZLE.write(puzzles()[0].answer)
  assert (bad.status_code, 'several solutions' in bad.text) == (422, True)
  assert 'engine_rows_by_difficulty_total{least="0"}' in text
  assert 'engine_mean_depth_by_difficulty{least="0"}' in text


def test_iterations_by_difficulty():
  puzzle = Sudoku(2, 3, minimal=1.0)
  reader = PuzzleReader(1, puzzle)
  for seed in range(5):
    example = puzzle.generate(np.random.default_rng(seed))
    row = reader.read({'puzzle': puzzle.write(example.question)}, 'v')
    assert row.context['difficulty'] == example.difficulty
  maze = Maze(7).generate(np.random.default_rng(0))
  row = PuzzleReader(1, Maze(7)).read(Maze(7).write(maze.question), 'v')
  assert row.context['difficulty'] == maze.difficulty == (maze.answer > 2).sum()
  _, policy = served(Solver)
  for depth, difficulty in ((1, 0), (2, 4), (4, 7), (9, 8)):
    policy.monitor.record_exit(depth, 'x', None, difficulty=difficulty)
  seen = policy.monitor.snapshot()
  assert seen['rows_by_difficulty'] == {0: 1, 4: 2, 8: 1}
  assert seen['mean_depth_by_difficulty'] == {0: 1.0, 4: 3.0, 8: 9.0}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp('bundle') / 'model.bundle'
  chain, policy = served(Solver, attempts=2, iterations=3)
  bundle.write(path, Programs(chain, Grid((1,), (1, 4))), policy, {})
  return path, (chain, policy)


def test_a_bundle_answers_as_its_run(written):
  path, parts = written
  chain, policy, grid = bundle.read(path)
  assert policy.reader == parts[1].reader
  with (
    Engine(chain, policy, grid.lengths, grid.batches) as other,
    engine_of(parts) as engine,
  ):
    items = [*typed(), '.' * 16]
    *answers, failure = other.predict(items)
    assert answers == engine.predict(items[:-1])
  assert isinstance(failure, Failure)


SQUARE = {'name': 'looped.sudoku:Sudoku', 'rows': 3}


@pytest.mark.parametrize(('name', 'value'), [
  ('kind', 'looped.policy:Options'), ('kind', 'looped.policy:LoopedPolicy'),
  ('kind', 'serve_lib.items:ItemReader'), ('kind', 'tokens'),
  ('puzzle', {'name': 'os:system'}), ('puzzle', 7), ('attempts', 2000),
  ('puzzle', {'name': 'looped.policy:PuzzleReader'}), ('attempts', 3),
  ('puzzle', {'name': 'looped.puzzle:Puzzle'}),
  ('puzzle', {'name': 'looped.sudoku:Sudoku', 'rows': 99}),
  ('puzzle', SQUARE), ('other', 1),
])  # fmt: skip
def test_another_reader_is_refused(written, tmp_path, name, value):
  arrays = bundle_test.content(written[0])
  manifest = json.loads(bytes(arrays['manifest.json']))
  manifest['reader'][name] = value
  arrays['manifest.json'] = bundle_test.of_bytes(json.dumps(manifest).encode())
  bundle._write(tmp_path / 'signed', arrays)
  # Arrays of another shape are found where the programs are compiled.
  words = 'its arrays' if value in (3, SQUARE) else 'content of a bundle, got'
  bundle_test.refused(tmp_path / 'signed', words)
