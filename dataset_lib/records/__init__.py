"""Records in the shards of TFRecord and ArrayRecord files."""
