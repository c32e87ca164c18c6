"""The speed table of `launch.benchmark eat_speed`: ratios, limits, printing.

Every ratio is taken within a round, against the dense form of ours whose
median is the smallest. A FLOP limit counts every block that a model runs once
and in full, as papers state it; what is really computed stands beside it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from eat import cost
from eat.model import EatClassifier
from eval_lib.timing import Estimate
from launch.eat_speed import lineup
from launch.eat_speed.lineup import Contender, Settings
from model_lib.bert import BertClassifier

Samples = Mapping[tuple[str, int], Float[np.ndarray, ' R']]


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table.

  Attributes:
    batch: rows of a batch.
    contender: its name.
    device: where it ran.
    is_best_dense: whether ratios are against this one.
    seconds: per example.
    flops: per example, what is computed, by formula.
    speedup: over the best dense form.
    flop_limit: the speed-up that FLOPs allow.
    share: of the limit that was reached, by median.
    over_torch: speed-up over PyTorch's BERT; None without it.
    over_torch_distil: over PyTorch's DistilBERT.
  """

  batch: int
  contender: str
  device: str
  is_best_dense: bool
  seconds: Estimate
  flops: float
  speedup: Estimate
  flop_limit: float
  share: float
  over_torch: Estimate | None
  over_torch_distil: Estimate | None


def rows(
  contenders: Sequence[Contender],
  samples: Samples,
  settings: Settings,
  devices: Mapping[str, str],
) -> list[Row]:
  """The table, batch by batch.

  Args:
    contenders: in the order of the table.
    samples: seconds per example of every round, by contender and batch; who
      is not in there is left out.
    settings: of the models.
    devices: where each contender ran.

  Raises:
    ValueError: at some batch there is no dense form to compare with.
  """
  table = []
  for batch in settings.batches:
    present = [one for one in contenders if (one.name, batch) in samples]
    seconds = {one.name: samples[one.name, batch] for one in present}
    best = best_dense(present, seconds)
    dense, _ = flops(best, settings)

    def ratio(reference, name, seconds=seconds):
      if reference not in seconds:
        return None
      return Estimate.of(seconds[reference] / seconds[name])

    for one in present:
      limit_flops, computed = flops(one, settings)
      speedup = ratio(best.name, one.name)
      limit = dense / limit_flops
      table.append(
        Row(
          batch=batch,
          contender=one.name,
          device=devices.get(one.name, ''),
          is_best_dense=one is best,
          seconds=Estimate.of(seconds[one.name]),
          flops=computed,
          speedup=speedup,
          flop_limit=limit,
          share=speedup.median / limit,
          over_torch=ratio(lineup.PYTORCH, one.name),
          over_torch_distil=ratio(lineup.PYTORCH_DISTIL, one.name),
        )
      )
  return table


def best_dense(
  contenders: Sequence[Contender], seconds: Mapping[str, Any]
) -> Contender:
  """The dense form with the smallest median.

  Raises:
    ValueError: there is none.
  """
  dense = [one for one in contenders if one.is_dense]
  if not dense:
    raise ValueError(
      'no dense form was timed; there is nothing to compare with'
    )
  return min(dense, key=lambda one: float(np.median(seconds[one.name])))


def flops(contender: Contender, settings: Settings) -> tuple[float, float]:
  """FLOPs per example, on average over the rows.

  Returns:
    (every block once and in full, what is really computed).
  """
  sizes = lineup.fields(settings, contender.weights)
  common: dict[str, Any] = dict(num_classes=lineup.NUM_CLASSES, **sizes)
  shape = (settings.length,)
  if contender.exit_rate is None:
    full = BertClassifier(**common).flops(shape)
    computed = BertClassifier(**common, cls_only=contender.cls_only)
    return full, computed.flops(shape)
  model = EatClassifier(
    **common,
    prune_layers=lineup.PRUNE_LAYERS,
    prune_ratios=lineup.PRUNE_RATIOS,
    window=settings.window,
    exit_layers=(lineup.EXIT_LAYER,),
  )
  tokens = cost.static_sizes(model, settings.length)
  stay = 1.0 - contender.exit_rate / 100
  first, last = (
    np.array(cost.stage_flops(model, settings.length, tokens, count_cls))
    @ (1.0, stay)
    for count_cls in (False, True)
  )
  return float(first), float(last)


@dataclasses.dataclass(frozen=True)
class LengthRow:
  """The table of lengths.

  Attributes:
    contender: 'padded' or 'buckets'.
    seconds: per example.
    speedup: over padding everything to the longest bucket.
    flop_limit: the speed-up that FLOPs allow.
  """

  contender: str
  seconds: Estimate
  speedup: Estimate
  flop_limit: float


def length_rows(samples: Samples, settings: Settings) -> list[LengthRow]:
  """The table of lengths; empty if that was not timed."""
  cases = [case for case in ('padded', 'buckets') if (case, 0) in samples]
  if len(cases) < 2:
    return []
  sizes = lineup.fields(settings, 'bert')
  model = BertClassifier(num_classes=lineup.NUM_CLASSES, cls_only=True, **sizes)
  buckets = np.array(settings.length_buckets)
  lengths = np.array(settings.row_lengths)
  places = np.searchsorted(buckets, lengths)
  cost = np.array([model.flops((int(size),)) for size in buckets])
  limits = {'padded': 1.0, 'buckets': float(cost[-1] / cost[places].mean())}
  return [
    LengthRow(
      contender=case,
      seconds=Estimate.of(samples[case, 0]),
      speedup=Estimate.of(samples['padded', 0] / samples[case, 0]),
      flop_limit=limits[case],
    )
    for case in cases
  ]


def print_rows(table: Sequence[Row], console: Any) -> None:
  """Prints a table for each batch size."""
  for batch in dict.fromkeys(row.batch for row in table):
    lines = [row for row in table if row.batch == batch]
    (best,) = (row.contender for row in lines if row.is_best_dense)
    printed = _table(
      f'batch {batch}; best dense form: {best}',
      'contender', 'ms / example', 'GFLOPs', 'speed-up over\nbest dense',
      'FLOP\nlimit', 'share\nof it', '/ PyTorch\nBERT',
      '/ PyTorch\nDistilBERT',
    )  # fmt: skip
    for row in lines:
      printed.add_row(
        row.contender,
        row.seconds.text(scale=1e3),
        f'{row.flops / 1e9:.3g}',
        row.speedup.text(),
        f'{row.flop_limit:.2f}',
        f'{row.share:.2f}',
        _median(row.over_torch),
        _median(row.over_torch_distil),
      )
    console.print(printed)


def print_length_rows(
  table: Sequence[LengthRow], title: str, console: Any
) -> None:
  """Prints the table of lengths, if there is one."""
  if not table:
    return
  printed = _table(
    title, 'dense model in the engine', 'ms / example', 'speed-up', 'FLOP limit'
  )
  for row in table:
    printed.add_row(
      row.contender,
      row.seconds.text(scale=1e3),
      row.speedup.text(),
      f'{row.flop_limit:.2f}',
    )
  console.print(printed)


def _median(ratio: Estimate | None) -> str:
  return '-' if ratio is None else f'{ratio.median:.2f}'


def _table(title: str, *headings: str) -> Any:
  import rich.box
  import rich.table

  table = rich.table.Table(
    title=title,
    box=rich.box.SIMPLE,
    collapse_padding=True,
    title_justify='left',
  )
  for heading in headings:
    table.add_column(heading, no_wrap=True)
  return table
