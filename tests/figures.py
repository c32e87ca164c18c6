"""Figures that a test makes, and a check that their texts can be read."""

import pytest
from matplotlib.transforms import Bbox


@pytest.fixture
def made(monkeypatch):
  """A list that every figure is added to instead of being written."""
  found = []
  monkeypatch.setattr(
    'eval_lib.plots.write', lambda made, _: found.append(made)
  )
  return found


@pytest.fixture
def assert_readable():
  """Checks that its texts are inside the picture and do not overlap."""

  def is_drawn(axes, tick):
    low, high = sorted(axes.get_xlim())
    is_inside = low <= tick.get_position()[0] <= high
    return axes.axison and tick.get_visible() and is_inside

  def check(figure, least):
    figure.draw_without_rendering()
    texts = []
    for axes in figure.axes:
      texts += [axes.xaxis.label, axes.yaxis.label, axes._left_title]
      texts += [axes.title, *axes.texts]
      if axes.get_legend():
        texts += axes.get_legend().get_texts()
      texts += [t for t in axes.get_xticklabels() if is_drawn(axes, t)]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) >= least
    for number, box in enumerate(boxes):
      assert figure.bbox.contains(box.x0, box.y0), box
      assert figure.bbox.contains(box.x1, box.y1), box
      # Boxes of lines that touch may share a pixel, letters do not.
      for other in boxes[:number]:
        shared = Bbox.intersection(box, other)
        assert shared is None or min(shared.size) < 3, (box, other)

  return check
