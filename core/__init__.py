"""What every package uses: errors, fields, files, the registry, processors."""

VERSION = '0.1.0'  # of the distribution, see setup.py
