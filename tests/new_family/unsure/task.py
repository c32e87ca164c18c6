"""Names how it is served."""

from train_lib.classification import Classification


class Unsure(Classification):
  """Classification that is served by a policy of its own."""

  SERVE = 'unsure.policy:serve'
