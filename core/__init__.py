"""What every package uses: errors, fields, files, the registry, processors."""
