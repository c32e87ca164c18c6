"""Figures that a test makes, and a check that their texts can be read."""

import matplotlib.figure
import pytest


@pytest.fixture
def made(monkeypatch):
  """A list that every figure is added to instead of being written."""
  found = []

  class Kept(matplotlib.figure.Figure):
    def savefig(self, path, **options):
      if self not in found:
        found.append(self)

  monkeypatch.setattr(matplotlib.figure, 'Figure', Kept)
  return found


@pytest.fixture
def assert_readable():
  """Checks that texts are inside the picture and do not overlap."""

  def check(figure, texts, least):
    figure.draw_without_rendering()
    texts = [text for text in texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) >= least
    for number, box in enumerate(boxes):
      text = texts[number]
      assert figure.bbox.contains(box.x0, box.y0), text
      assert figure.bbox.contains(box.x1, box.y1), text
      # Boxes of lines that touch may share a pixel, letters do not.
      for other in boxes[:number]:
        width = min(box.x1, other.x1) - max(box.x0, other.x0)
        height = min(box.y1, other.y1) - max(box.y0, other.y0)
        assert width < 3 or height < 3, text

  return check
