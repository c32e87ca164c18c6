"""The page of `launch.classify`: quality, speed, confusion, rows; as files.

Test rows are read here for the first time after the trainings, and nothing is
chosen on them.
"""

import csv
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from core import files
from eval_lib import certificate, confusion, plots, report
from launch.classify_data import ADAPTIVE, DENSE, RESULT, SPEED, SPLITS, Kind

SPLIT = 'test'
SERVED, BASELINE = 'adaptive, as served', 'embeddings + logistic regression'
# Of texts; of images, the last is as the served model.
DENSE_TIMES = 'dense', 'dense, XLA', 'dense, ONNX Runtime'
TRY = (
  'Try more steps (--config.phases.0.least_steps) or another learning rate '
  '(--config.optimizer.lr), with another --out, and choose by the accuracies '
  'on validation rows in result.json: chosen by test rows, a model seems '
  'better than it is.'
)
SHOWN_ROWS, SHOWN_IMAGES = 15, 8  # on the page, in a line of it


def write(out: pathlib.Path, kind: Kind, pretrained: str) -> str:
  """Writes report.json, test_answers.csv, and report.png and .pdf into `out`.

  Returns `warning`. Raises the errors of reading the runs in `out`.
  """
  rows, sizes, names = answers(str(out / ADAPTIVE), kind)
  summary: dict[str, Any] = {
    'rows': sizes,
    'accuracy': accuracies(out, kind, pretrained, rows, sizes[SPLIT]),
    'speed': speeds(out),
    'certificate': {
      name: value
      for name, value in certified(out / ADAPTIVE).items()
      if name not in ('dataset', 'drift')
    },
    'classes': confusion.table(*ids(rows, names), names),
  }
  files.write_json(out / 'report.json', summary)
  report.write_csv(out / 'test_answers.csv', rows)
  table: dict[str, dict[str, str]] = {
    name: {
      'model': name,
      'accuracy': f'{value:.3f}',
      '95 % interval': f'{low:.3f} to {high:.3f}',
    }
    for name, (value, low, high) in intervals(summary).items()
  }
  for row in summary['speed']:
    line = table.setdefault(row['candidate'], {'model': row['candidate']})
    median, *_ = row['milliseconds']
    line[f'ms a row, batch {row["batch"]}'] = f'{median:.3g}'
  said = certificate.words(summary['certificate'], kind.loss)
  said = f'{said}\n{speedup(summary)}'.rstrip()
  report.print_table(f'{sizes[SPLIT]} test rows', [*table.values()], said)
  warned = warning(summary)
  with plots.if_installed():
    said = f'{said}\n{warned}'.rstrip()
    draw(out / 'report.png', kind, summary, said, rows, names)
  return warned


def answers(
  workdir: str, kind: Kind
) -> tuple[list[dict[str, Any]], dict[str, int], tuple[str, ...]]:
  """Returns the certified answers of the test rows, sizes of splits, classes.

  Rows have 'label', 'answer', 'confidence', and the columns `kind.spent`, of
  the computation, and `kind.shown`, a text or the path of an image. Rows that
  the server refuses, as texts without a token, are left out.
  """
  from dataset_lib import builder
  from serve_lib.chain import Failure, InputError, checked
  from serve_lib.engine import Engine
  from train_lib import loading

  config = loading.load_config(workdir)
  sources = {one: builder.build_source(config.dataset, one) for one in SPLITS}
  test, names = sources[SPLIT], sources[SPLIT].info.class_names
  items = [test.item(index) for index in range(len(test))]
  options = dict([kind.serve.split('=')])
  with Engine(*loading.serve(workdir, options=options)) as engine:
    given = engine.predict(items)
  refused = [a for a in given if isinstance(a, Failure)]
  checked([a for a in refused if not isinstance(a.error, InputError)])
  if refused:
    logging.warning(
      '%d test rows are refused, and count as wrong: %s',
      len(refused), refused[0].error,
    )  # fmt: skip
  rows = [
    {
      'label': names[test.record(index)['label']],
      'answer': answer.label,
      'confidence': max(answer.probabilities.values()),
      kind.spent: answer.fields[kind.spent],
      kind.shown: ' | '.join(
        item[key] for key in ('text', 'pair', 'image') if key in item
      ),
    }
    for index, (item, answer) in enumerate(zip(items, given, strict=True))
    if not isinstance(answer, Failure)
  ]
  return rows, {name: len(one) for name, one in sources.items()}, names


def accuracies(
  out: pathlib.Path,
  kind: Kind,
  pretrained: str,
  rows: Sequence[Mapping[str, Any]],
  count: int,
) -> dict[str, float]:
  """Returns the test accuracies of the models and, if any, of a baseline.

  `rows` are those of the `count` test rows that have an answer.
  """
  results = {
    name: files.read_object(out / name / RESULT)[f'{SPLIT}/accuracy']
    for name in (DENSE, ADAPTIVE)
  }
  served = sum(row['label'] == row['answer'] for row in rows) / count
  accuracy = {
    'dense': results[DENSE],
    f'adaptive, {kind.plain}': results[ADAPTIVE],
    SERVED: served,
  }
  if kind.shown == 'text':
    from launch import text_baseline

    accuracy[BASELINE] = text_baseline.accuracy(str(out / DENSE), pretrained)
  return accuracy


def intervals(summary: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
  """Returns accuracies with their exact (Clopper-Pearson) 95 % intervals."""
  from scipy import stats  # slow to import

  rows = summary['rows'][SPLIT]
  return {
    name: (value, *stats.binomtest(round(value * rows), rows).proportion_ci())
    for name, value in summary['accuracy'].items()
  }


def speeds(out: pathlib.Path) -> list[dict[str, Any]]:
  """Returns milliseconds of a row with quartiles, by candidate and batch.

  Candidates have the names of `accuracies`.
  """
  path, tau = out / SPEED / 'timings.csv', certified(out / ADAPTIVE).get('tau')
  names = {
    'dense/never': 'dense', 'ONNX Runtime dense': 'dense, exported to ONNX',
    'never': 'adaptive, full depth', 'adaptive, XLA': SERVED,
    'adaptive, ONNX Runtime': SERVED,
    'never' if tau is None else f'confidence={tau:g}': SERVED,
  }  # fmt: skip
  return [
    {
      'candidate': names.get(row['candidate'], row['candidate']),
      'batch': int(row['batch']),
      'milliseconds': [
        1e3 * float(row[f'seconds{end}']) for end in ('', '_low', '_high')
      ],
    }
    for row in (_read_csv(path) if path.exists() else ())
  ]


def certified(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the certificate of a run, {} without one."""
  path = workdir / 'certificate.json'
  if not path.exists():
    return {}
  return dict(files.read_object(path)['sources'][''])


def _read_csv(path: pathlib.Path) -> list[dict[str, str]]:
  with path.open(newline='', encoding='utf-8') as file:
    return [*csv.DictReader(file)]


def ids(
  rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the class ids of labels and answers, both `[N]`."""
  of = {name: number for number, name in enumerate(names)}
  labels, given = ([of[r[k]] for r in rows] for k in ('label', 'answer'))
  return np.array(labels), np.array(given)


def draw(
  path: pathlib.Path,
  kind: Kind,
  summary: Mapping[str, Any],
  said: str,
  rows: Sequence[Any],
  names: Sequence[str],
) -> None:
  """Draws the page, with what is `said`, as PNG and PDF."""
  with plots.figure(path, rows, (11.0, 13.0)) as figure:
    sizes = ', '.join(f'{n} {name}' for name, n in summary['rows'].items())
    title = f'{path.resolve().parent.name}: {sizes} rows\n'
    lines = [textwrap.fill(line, 110) for line in said.splitlines()]
    head = title + '\n'.join(lines)
    figure.suptitle(head, x=0.01, ha='left', fontsize=11)
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=(2, 4, 4))
    left, right = top.subplots(1, 2)
    _bars(left, 'Accuracy of test rows, %, with 95 % interval', {
      name: [100 * x for x in ends] for name, ends in intervals(summary).items()
    }, '.1f')  # fmt: skip
    if summary['speed']:
      _bars(right, 'Milliseconds for a row', {
        f'{row["candidate"]}, batch {row["batch"]}': row['milliseconds']
        for row in summary['speed']
      }, '#.3g')  # fmt: skip
    else:
      right.remove()
    source = f'{SPLIT}, adaptive, as served'
    confusion.plot(middle.subplots(), *ids(rows, names), names, source)
    show = _texts if kind.shown == 'text' else _images
    show(bottom, _parts(rows, kind), kind)


def speedup(summary: Mapping[str, Any]) -> str:
  """Returns how fast the served model is against the dense one, '' untimed."""
  times = {
    (row['candidate'], row['batch']): row['milliseconds'][0]
    for row in summary['speed']
  }
  said = {}
  for (name, batch), dense in times.items():
    if name in DENSE_TIMES and (served := times.get((SERVED, batch))):
      slower = ' (slower)' if served > dense else ''
      said[batch] = f'{dense / served:.2f}x{slower} at batch {batch}'
  listed = ', '.join(said.values())
  about = 'Speed of the served model against the dense one'
  return f'{about}: {listed}.' if listed else ''


def warning(summary: Mapping[str, Any]) -> str:
  """Returns what is as good as the trained models, and what to try; or ''."""
  accuracy = summary['accuracy']
  supports = [row['support'] for row in summary['classes']]
  most, said = max(supports) / sum(supports), []
  if accuracy['dense'] < most + 1e-6:
    said.append(
      f'The dense model is right on {accuracy["dense"]:.1%} of the test rows, '
      f'one class for all on {most:.1%}.'
    )
  served, baseline = accuracy[SERVED], accuracy.get(BASELINE, 0.0)
  if baseline > served:
    said.append(
      f'The logistic regression is better than the served model, '
      f'{baseline:.1%} against {served:.1%}.'
    )
  return ' '.join([*said, TRY]) if said else ''


def _bars(
  axes: Any, title: str, values: Mapping[str, Sequence[float]], form: str
) -> None:
  """Draws (value, lower, upper end) of each name as a bar with its number."""
  middle, low, high = np.array([*values.values()]).reshape(-1, 3).T
  places = np.arange(len(values))[::-1]
  ends = (middle - low, high - middle) if (high > low).any() else None
  bars = axes.barh(places, middle, xerr=ends, color=plots.COLOURS[0])
  axes.bar_label(bars, [f'{x:{form}}'.rstrip('.') for x in middle], padding=4)
  axes.set_yticks(places, [*values])
  axes.set_xlim(0, max(high) * 1.15)
  axes.set_title(title)
  axes.grid(False)


def _parts(
  rows: Sequence[Mapping[str, Any]], kind: Kind
) -> dict[str, list[Mapping[str, Any]]]:
  """Returns rows by title: the cheapest, the dearest and the wrong ones."""
  order = sorted(rows, key=lambda row: (row[kind.spent], -row['confidence']))
  wrong = [row for row in order if row['answer'] != row['label']]
  parts = {'Cheapest first': order, 'Dearest first': order[::-1]}
  least, most = (row[kind.spent] for row in (order[0], order[-1]))
  if least == most:
    parts = {f'All rows take {most} {kind.unit}; surest first': order}
  return parts | {
    f'Wrong ({len(wrong)} of {len(rows)}), surest first': sorted(
      wrong, key=lambda row: -row['confidence']
    ),
  }


def _texts(figure: Any, parts: Mapping[str, Sequence[Any]], kind: Kind) -> None:
  for number, (title, rows) in enumerate(parts.items()):
    shown = rows[: SHOWN_ROWS // len(parts)]
    lines = [title, *(_line(row, kind) for row in shown)]
    figure.text(
      0.01, 0.98 - number / len(parts), '\n'.join(lines), va='top',
      fontsize=10, family=('monospace', 'sans-serif'), linespacing=1.4,
    )  # fmt: skip


def _line(row: Mapping[str, Any], kind: Kind) -> str:
  text = ' '.join(row[kind.shown].split())  # the picture cuts the line to fit
  spent = f'{row[kind.spent]:2d} {kind.unit}'
  return f'  {spent}  {row["confidence"]:4.0%}  {_answer(row)}: {text}'


def _answer(row: Mapping[str, Any]) -> str:
  is_right = row['answer'] == row['label']
  return row['answer'] + ('' if is_right else f' (is {row["label"]})')


def _images(
  figure: Any, parts: Mapping[str, Sequence[Any]], kind: Kind
) -> None:
  from PIL import Image

  from dataset_lib import image_ops

  lines = figure.subfigures(len(parts), 1)
  for part, (title, rows) in zip(lines, parts.items(), strict=True):
    part.suptitle(title, x=0.01, ha='left', fontsize=10)
    line = part.subplots(1, SHOWN_IMAGES)
    for axes in line:
      axes.set_axis_off()
    for axes, row in zip(line, rows, strict=False):
      data = files.read_record(row[kind.shown])
      image = Image.fromarray(image_ops.decode(data, max_pixels=2**30))
      image.thumbnail((256, 256))
      axes.imshow(np.asarray(image))
      said = plots.shown(_answer(row)).replace(' (is', '\n(is')
      spent = f'{row[kind.spent]} tokens, {row["confidence"]:.0%}'
      axes.set_title(f'{said}\n{spent}', fontsize=7, weight='normal')
