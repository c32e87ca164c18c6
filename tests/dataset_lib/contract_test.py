"""Classes of a published head in the order of ours."""

import pytest

from dataset_lib import contract


@pytest.mark.parametrize(
  ('theirs', 'ours', 'order'),
  [
    ((), 'ab', slice(None)), ('ab', (), slice(None)), ('ab', 'ab', slice(None)),
    ('abc', 'cab', [2, 0, 1]), ('ab', 'cd', slice(None)), ('aba', 'abb', None),
    ('ab', 'bc', None), ('abc', 'adc', slice(None)),
  ],
)  # fmt: skip
def test_classes_of_a_published_head(theirs, ours, order):
  if order is None:
    with pytest.raises(ValueError, match=r'its head: .*fresh head'):
      contract.order_of_head((*theirs,), (*ours,))
  else:
    assert contract.order_of_head((*theirs,), (*ours,)) == order
