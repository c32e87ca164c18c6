"""The reference of configurations is that of the classes."""

from benchmarks import reference


def test_the_page_is_up_to_date():
  text = reference.PAGE.read_text()
  assert text == reference.page(), 'run: python -m benchmarks.reference'


def test_a_field_has_its_range_default_and_comment():
  lines = reference.PAGE.read_text().splitlines()
  assert (
    '| `clip_norm` | a number in [0.0, 1000000.0] | `1.0` | Largest global '
    'norm of the gradients; 0 disables clipping. |'
  ) in lines
  assert '| `every_steps` | a number in [0, 2147483647] | `0.0` |  |' in lines
  for title in ("dataset, name='glue'", '`eat.model:EatClassifier`', 'mesh'):
    assert f'## {title}' in lines
