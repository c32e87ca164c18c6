"""Whether what a figure says can be read."""


def assert_readable(axes, least):
  """At least so many texts, all in the picture, no two over each other."""
  figure = axes.figure
  figure.draw_without_rendering()
  boxes = [text.get_window_extent() for text in axes.texts]
  assert len(boxes) >= least
  for number, box in enumerate(boxes):
    text = axes.texts[number]
    assert figure.bbox.contains(box.x0, box.y0), text
    assert figure.bbox.contains(box.x1, box.y1), text
    # Boxes of lines that touch may share a pixel, letters do not.
    for other in boxes[:number]:
      width = min(box.x1, other.x1) - max(box.x0, other.x0)
      height = min(box.y1, other.y1) - max(box.y0, other.y0)
      assert width < 3 or height < 3, text
