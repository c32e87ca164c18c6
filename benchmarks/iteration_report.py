"""Iterations by kind of token, convergence of states, coloured sentences.

Simoulin and Crabbe (2021), section 4.1. A halted token keeps its state and has
cosine 1, so only the mean over running tokens can show a fixed point. Halting
selects these tokens, so their share is reported too. A small `lambda^n` also
makes consecutive states similar.

Dependency labels as in Tables 3 to 5: a token has the label of its word
(footnote 7). Labels are marked if mean > mean of labels + standard deviation.
"""

import collections
import dataclasses
import functools
import html
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from albert_act.encoder import Albert
from albert_act.token_kinds import KINDS, masks
from benchmarks import pictures
from core import files
from core.errors import BadRecord, InvalidDataError
from dataset_lib import builder, source, tagged_words, text_rows, tokenizer
from dataset_lib.tokenizer import Tokenizer
from eval_lib import plots
from eval_lib.report import Table
from halting import loop
from train_lib.run_directory import TOKENIZER

MODEL, SPLIT = Albert, 'validation'
INPUTS = ('tokens', 'token_types', 'length')
DEPTH = 'executed depth of a row'
# Axes of the curves over the iterations, and suffixes of their columns.
CURVES = {
  'cosine, all tokens': '',
  'cosine, still running': ' running',
  'share still running': ' share',
}
_STEP = 32  # tokens; rows are padded to multiples, each of which is compiled
_OPAQUE = 170  # of 255, at most iterations: light enough to read on
_MARK = '▁'  # SentencePiece's space
_SPECIAL = re.compile(r'\[.+\]|<.+>')
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Iterations of each token</title>
<body style="max-width:60em; line-height:1.7; font-family:monospace">
{body}
</html>
"""

# A batch, the iterations of its tokens, and cosines `[N, B, L]`.
Traced = tuple[Mapping[str, Any], Int[np.ndarray, 'B L'], Any]
Rows = list[dict[str, Any]]


class Analysis(NamedTuple):
  """The result of a pass over rows; kinds without tokens are left out."""

  # (count, mean, standard deviation) by kind, and of the rows as `DEPTH`.
  iterations: dict[str, tuple[int, float, float]]
  # By the names in `CURVES`, then by kind; NaN of no tokens.
  curves: dict[str, dict[str, Float[np.ndarray, ' N']]]


def traced(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Iterator[Traced]:
  """Yields (batch, iterations, cosines); padding has 0 iterations.

  A cosine is that of the states before and after an iteration, 1 for a halted
  token. A `dynamic` model has no trace.
  """

  def cosine(visit: loop.Visit) -> Array:
    x, y = (s.astype(jnp.float32) for s in (visit.before, visit.after))
    return optax.losses.cosine_similarity(x, y, epsilon=1e-12)

  @jax.jit
  def run(variables: Any, *inputs: Array) -> Any:
    form: Any = dict(trace=cosine, method='encode')
    encoded: Any = model.apply(variables, *inputs, **form)
    steps = encoded.ponder['steps']
    # By some rules the state goes on after a token has halted.
    running = jnp.arange(model.max_iterations)[:, None, None] < steps[None]
    return steps, jnp.where(running, encoded.trace, 1.0)

  for batch in rows:
    inputs = (jnp.asarray(batch[name]) for name in INPUTS)
    yield batch, *jax.device_get(run(variables, *inputs))


def analyse(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Analysis:
  """Analyses batches, see `masks` and `traced`."""
  limit, find, sums = model.max_iterations, jax.jit(masks), np.zeros(())
  for batch, steps, cosines in traced(model, variables, rows):
    flags = jax.device_get(find(dict(batch)))
    # Mark the first deepest token of each row.
    deepest = np.arange(steps.shape[1]) == steps.argmax(1)[:, None]
    flags[DEPTH] = deepest & flags['all']
    running = np.arange(limit)[:, None, None] < steps
    moments = np.ones_like(steps), steps, np.square(steps)
    values = [*moments, *cosines, *(running * cosines), *running]
    tokens = [flags[kind] for kind in (*KINDS, DEPTH)]
    sums = sums + np.einsum('kbl,vbl->kv', tokens, values, dtype=np.float64)
  result = Analysis({}, {name: {} for name in CURVES})
  for kind, row in zip((*KINDS, DEPTH), sums, strict=True):
    count, total, squares = row[:3].tolist()
    if not count:
      continue
    mean = total / count
    std = max(squares / count - mean**2, 0.0) ** 0.5
    result.iterations[kind] = int(count), mean, std
    similar, still, share = row[3:].reshape(3, limit) / count
    with np.errstate(invalid='ignore'):
      lines = similar, still / share, share
    for curve, line in zip(result.curves.values(), lines, strict=True):
      if kind != DEPTH:
        curve[kind] = line
  return result


def tables(analysis: Analysis) -> list[Table]:
  lines = {
    f'{kind}{suffix}': analysis.curves[name][kind]
    for kind in analysis.curves['cosine, all tokens']
    for name, suffix in CURVES.items()
  }
  limit = len(lines['all'])
  similarity = [
    dict(iteration=n + 1, **{k: _rounded(y[n], 6) for k, y in lines.items()})
    for n in range(limit)
  ]
  kinds = analysis.iterations
  iterations = [
    _row('tokens', kind, count, mean, std=_rounded(std))
    for kind, (count, mean, std) in kinds.items()
  ]
  tokens, depth = (kinds[kind][1] / limit for kind in ('all', DEPTH))
  return [
    Table(
      'iterations', f'Iterations, at most {limit}', iterations,
      f'tokens take {tokens:.0%} of the iterations, rows that wait for their '
      f'last token {depth:.0%}',
    ),
    Table(
      'similarity', 'Cosine of states before and after', similarity,
      'a halted token counts as 1 in all, and not in running, the mean over '
      'the share that still runs',
      ['iteration', *(f'all{suffix}' for suffix in CURVES.values())],
    ),
  ]  # fmt: skip


def _row(
  column: str, name: str, count: int, mean: float = np.nan, **others: Any
) -> dict[str, Any]:
  return {column: name, 'count': count, 'mean': _rounded(mean), **others}


def _rounded(value: float, digits: int = 4) -> float | None:
  return None if np.isnan(value) else round(float(value), digits)


def label_table(
  model: Albert,
  variables: Any,
  tokenizer: Tokenizer,
  sentences: Sequence[Sequence[tuple[str, str]]],
  max_length: int,
  at_least: int = 1,
) -> Table:
  """Analyses sentences, lists of (word, label), of a treebank.

  Subtypes are merged, as nmod:poss into nmod. Labels of less than `at_least`
  words, and words after `max_length` tokens are left out.
  """
  encoded, places = tagged_words.encode_words(
    tokenizer, [[word for word, _ in pairs] for pairs in sentences], max_length
  )
  padded = range(_STEP, max_length, _STEP)
  info = source.DatasetInfo(
    'tokens', (max_length,), 'int32', 1, (), len(sentences),
    length_buckets=text_rows.length_buckets(padded, max_length),
  )  # fmt: skip
  records = text_rows.TokenSource(
    info, encoded, np.zeros(len(sentences)), tokenizer.pad_id
  )
  batches = builder.spread(records, len(sentences)).batches()
  depths, labelled = [], []
  for batch, steps, _ in traced(model, variables, batches):
    for row in np.flatnonzero(batch['mask']):
      number = batch['index'][row]
      depths.append(steps[row].max())
      pairs = zip(sentences[number], places[number], strict=False)
      labelled += [
        (label.partition(':')[0], steps[row, start:stop])
        for (_, label), (start, stop) in pairs
        if label != tagged_words.NO_TAG
      ]
  labels, below = label_rows(labelled, at_least)
  left_out = sum(map(len, sentences)) - len(labelled)
  below.append(_row('label', 'words left out', left_out))
  below.append(_row('label', DEPTH, len(depths), np.mean(depths)))
  return Table(
    'labels', f'Iterations by dependency label, {len(sentences)} sentences',
    labels + below,
    '* above the mean of the labels by more than their standard deviation; '
    'labels of few words (--label_words), words without a label and words '
    'after the longest row are left out',
  )  # fmt: skip


def label_rows(words: Iterable[Any], at_least: int) -> tuple[Rows, Rows]:
  """Averages iterations `[L]` of words (label, iterations) of each label.

  Returns rows of labels of `at_least` words, the most frequent first, and
  summary rows. A word without tokens does not count.
  """
  of_label: dict[str, list[Any]] = collections.defaultdict(list)
  for name, steps in words:
    if len(steps):
      of_label[name].append(steps)
  means = {
    name: float(np.concatenate(steps).mean())
    for name, steps in of_label.items()
    if len(steps) >= at_least
  }
  values = [*means.values()] or [np.nan]
  average, std = float(np.mean(values)), float(np.std(values))
  labels = [
    _row('label', name, len(of_label[name]), mean,
         high='*' if mean > average + std else '')
    for name, mean in means.items()
  ]  # fmt: skip
  labels.sort(key=lambda row: (-row['count'], row['label']))
  rare = sum(len(x) for name, x in of_label.items() if name not in means)
  return labels, [
    _row('label', 'mean of the labels', len(labels), average, high=''),
    _row('label', 'standard deviation of the labels', len(labels), std),
    _row('label', 'words of rarer labels', rare),
  ]


def words(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
  """Yields the text of each token, and if it continues a word.

  WordPiece marks such a token by '##', SentencePiece each other one by '▁'.
  """
  is_sentencepiece = any(name.startswith(_MARK) for name in names)
  for name in names:
    if is_sentencepiece:
      is_start = name.startswith(_MARK) or _SPECIAL.fullmatch(name)
      yield ' ' if name == _MARK else name.removeprefix(_MARK), not is_start
    else:
      is_piece = name.startswith('##') and len(name) > 2
      yield name[2:] if is_piece else name, is_piece


def page(batches: Iterable[Traced], names: Any, most: int) -> bytes:
  """Returns the real rows of `traced` as HTML; `names` of token ids."""
  numbers = range(1, most + 1)
  body = _paragraph('iterations', [*map(str, numbers)], numbers, most)
  for batch, steps, _ in batches:
    for row in np.flatnonzero(batch['mask']):
      spent = steps[row, : batch['length'][row]]
      tokens = names(batch['tokens'][row, : len(spent)].tolist())
      title = f'mean {spent.mean():.1f}, executed {spent.max()}'
      body += _paragraph(title, tokens, spent.tolist(), most)
  # A lone surrogate in a token cannot be encoded.
  return _PAGE.format(body=body).encode(errors='xmlcharrefreplace')


def _paragraph(
  title: str, names: Sequence[str], iterations: Sequence[int], most: int
) -> str:
  text = f'<p><b>\n{title}\n</b><br>\n'
  for (word, is_glued), spent in zip(words(names), iterations, strict=True):
    fill = f'{plots.COLOURS[0]}{round(_OPAQUE * spent / most):02x}'
    look = f'style="background:{fill}" title="{spent} of {most}"'
    space = '' if is_glued else '\n'
    text += f'{space}<span {look}>{html.escape(word)}</span>'
  return text


def write(
  flags: Any, config: Any, split: str, loaded: Any, out: pathlib.Path
) -> list[Table]:
  """Draws the curves and writes the page of a run; returns the tables."""
  labelled = read_treebank(flags.treebank)
  records = builder.build_source(config.dataset, split, loaded.task.info)
  vocab = tokenizer.load(pathlib.Path(flags.workdir) / TOKENIZER)
  model = dataclasses.replace(loaded.task.model, dynamic=False, remat_chunk=0)
  spread = functools.partial(builder.spread, records, seed=config.seed)
  rows = spread(flags.rows).batches()
  analysis = analyse(model, loaded.variables, rows)
  result = tables(analysis)
  if labelled:
    length = records.info.input_shape[0]
    labels = label_table(
      model, loaded.variables, vocab, labelled, length, flags.label_words
    )
    result.append(labels)
  if flags.sentences:
    rows = spread(flags.sentences).batches()
    shown = traced(model, loaded.variables, rows)
    content = page(shown, vocab.names, model.max_iterations)
    files.write_bytes(out / 'sentences.html', content)
  with plots.if_installed():
    title = 'Similarity of consecutive states'
    pictures.plot_iterations(out / 'similarity', analysis.curves, title)
  return result


def read_treebank(file: str) -> list[list[tuple[str, str]]]:
  """Returns (word, dependency label or '_') of each sentence; prints faults."""
  sentences, bad = [], []
  path = pathlib.Path(file).expanduser()
  rows = tagged_words.TaggedFile(path, 'deprel') if file else ()
  for row in range(len(rows)):
    try:
      sentences.append(rows[row])
    except BadRecord as fault:
      bad.append(fault)
  if file and not sentences:
    first = f'; the first: {bad[0]}' if bad else ''
    raise InvalidDataError(
      f'{file}: expected sentences in CoNLL-U, none of its {len(rows)} can be '
      f'used{first}'
    )
  if bad:
    line = f'{file}: {len(bad)} sentences with faults are left out; the first'
    print(f'{line}: {bad[0]}', file=sys.stderr)
  return sentences
