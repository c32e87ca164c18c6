"""The former place of configs/images.py, whose `data` was named `root`."""

import re

from configs import images


def get_config(arg=''):
  return images.get_config(re.sub(r'(^|,)root=', r'\1data=', arg or ''))
