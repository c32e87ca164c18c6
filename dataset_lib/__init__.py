"""Input pipelines: Grain over random-access sources, uint8 to the device."""
